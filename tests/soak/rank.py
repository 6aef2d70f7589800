"""A rank of the soak: random operations, the same on all ranks. Small whole numbers make each result exact.

``rank.py FOLDER SECONDS SEED MAX_BYTES`` under ``bagua run``. Writes FOLDER/rank-N.pid at the start and
FOLDER/rank-N.json at the end: operations, bytes, groups, and what was wrong.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import torch

import bagua.torch_api as bagua
from bagua.algorithms.codec import Codec
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.job.session import current

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
REDUCTIONS = {"SUM": torch.Tensor.sum, "MIN": torch.Tensor.amin, "MAX": torch.Tensor.amax}
CODECS = [Codec(name, error_feedback=False) for name in ("fp16", "minmax8", "int4", "onebit")]
KINDS = (
    *["allreduce"] * 6, *["allreduce_inplace"] * 3, "broadcast", "reduce", "allgather", "gather", "scatter",
    "reduce_scatter", "alltoall", "ring", "barrier", "group",
)  # fmt: skip
ROUND = 40  # operations between two looks at the clock


class Soak:
    def __init__(self, seed, max_bytes):
        self.draw = random.Random(seed)  # the same on all ranks
        self.max_bytes = max_bytes
        self.rank, self.everyone = bagua.get_rank(), list(range(bagua.get_world_size()))
        self.session = current()
        self.world = communicators(self.session).world
        self.members, self.group = self.everyone, self.world
        self.number, self.groups, self.bytes = 0, 0, 0
        self.wrong = []

    def step(self):
        """The next operation of the plan."""
        self.number += 1
        draw, kind = self.draw, self.draw.choice(KINDS)
        dtype, shared = draw.choice(DTYPES), draw.random() < 0.5
        largest = self.max_bytes if draw.random() < 0.2 or self.number < 8 else self.max_bytes // 16
        nbytes = largest if self.number < 8 else int(largest ** draw.random())
        name, codec = draw.choice(list(REDUCTIONS)), draw.choice(CODECS) if draw.random() < 0.3 else None
        whole = draw.random() < 0.5
        members, comm = (self.everyone, self.world) if whole else (self.members, self.group)
        root = draw.randrange(len(members))
        if kind == "group":
            self.regroup()
        if kind in ("group", "barrier") or self.rank not in members:
            if kind == "barrier" and self.rank in members:
                bagua.barrier(comm)
            return
        count = nbytes // dtype.itemsize // len(members)
        self.bytes += count * len(members) * dtype.itemsize
        me, n, op = members.index(self.rank), len(members), bagua.ReduceOp[name]

        def of(rank, length=count):
            """That which this rank gives."""
            return ((torch.arange(length) + rank + self.number) % 5).to(dtype)

        def buffer(length=count, values=None):
            made = (bagua.empty if shared else torch.empty)(length, dtype=dtype)
            return made if values is None else made.copy_(values)

        def reduced(length=count):
            every = torch.stack([of(rank, length).to(torch.float64) for rank in members])
            return REDUCTIONS[name](every, dim=0).to(dtype)

        found = buffer()
        match kind:
            case "allreduce" if codec and dtype is torch.float32 and name == "SUM":
                bagua.allreduce(buffer(values=of(self.rank)), found, op, comm, codec=codec)
                return  # it rounds
            case "allreduce":
                bagua.allreduce(buffer(values=of(self.rank)), found, op, comm)
                wanted = reduced()
            case "allreduce_inplace":
                bagua.allreduce_inplace(found.copy_(of(self.rank)), op, comm)
                wanted = reduced()
            case "reduce":
                bagua.reduce(buffer(values=of(self.rank)), found, root, op, comm)
                wanted = reduced() if me == root else None
            case "reduce_scatter":
                bagua.reduce_scatter(buffer(count * n, of(self.rank, count * n)), found, op, comm)
                wanted = reduced(count * n)[me * count : (me + 1) * count]
            case "broadcast":
                bagua.broadcast(found.copy_(of(self.rank)), root, comm)
                wanted = of(members[root])
            case "allgather" | "gather":
                found = buffer(count * n)
                ends = (comm,) if kind == "allgather" else (root, comm)
                getattr(bagua, kind)(buffer(values=of(self.rank)), found, *ends)
                wanted = torch.cat([of(rank) for rank in members]) if kind == "allgather" or me == root else None
            case "scatter":
                bagua.scatter(buffer(count * n, of(self.rank, count * n)), found, root, comm)
                wanted = of(members[root], count * n)[me * count : (me + 1) * count]
            case "alltoall":
                found = buffer(count * n)
                bagua.alltoall(buffer(count * n, of(self.rank, count * n)), found, comm)
                wanted = torch.cat([of(rank, count * n)[me * count : (me + 1) * count] for rank in members])
            case "ring":
                if n == 1:
                    return
                source = buffer(values=of(self.rank))
                turns = [lambda: bagua.send(source, (me + 1) % n, comm), lambda: bagua.recv(found, (me - 1) % n, comm)]
                for turn in turns[:: -1 if me % 2 else 1]:
                    turn()
                wanted = of(members[me - 1])
        if wanted is not None and not torch.equal(found, wanted):
            where = int((found != wanted).nonzero()[0])
            self.wrong.append(f"operation {self.number}, {kind} of {count} x {dtype}, {name}, at {where} of {members}")

    def regroup(self):
        """Some of the ranks make a communicator of their own; the one before goes."""
        self.groups += 1
        if self.groups > 1 and self.rank in self.members:
            self.session.connection.destroy_comm(self.group.id)
        self.members = sorted(self.draw.sample(self.everyone, self.draw.randint(1, len(self.everyone))))
        if self.rank in self.members:
            self.group = Communicator(1_000_000 + self.groups, self.members, self.rank)
            self.session.connection.create_comm(self.group.id, self.group.ranks)

    def go_on(self, deadline):
        """True if it is not over: rank 0's clock decides, and anything wrong anywhere ends it."""
        flag = torch.tensor([int(self.rank == 0 and time.monotonic() > deadline) + 2 * bool(self.wrong)])
        bagua.allreduce_inplace(flag, bagua.ReduceOp.MAX)
        return not flag.item()


def main():
    folder, seconds, seed, max_bytes = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    bagua.init_process_group()
    soak = Soak(seed, max_bytes)
    (folder / f"rank-{soak.rank}.pid").write_text(f"{os.getpid()} {os.getppid()}")
    deadline = time.monotonic() + seconds
    while soak.go_on(deadline):
        for _ in range(ROUND):
            soak.step()
    found = {"operations": soak.number, "bytes": soak.bytes, "groups": soak.groups, "wrong": soak.wrong[:5]}
    (folder / f"rank-{soak.rank}.json").write_text(json.dumps(found))
    bagua.barrier()
    bagua.destroy_process_group()
    sys.exit(1 if soak.wrong else 0)


if __name__ == "__main__":
    main()
