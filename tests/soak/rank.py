"""A rank of the soak: random operations, the same on all ranks, each result checked at some places.

``rank.py FOLDER SECONDS SEED MAX_BYTES`` under ``bagua run``. Writes FOLDER/rank-N.pid at the start and
FOLDER/rank-N.json at the end: operations, bytes, groups, and what was wrong.
"""

import inspect
import json
import os
import random
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "data_plane"))  # whatever PYTHONSAFEPATH says

import numpy as np
import torch
from plane import codecs, reference

import bagua.torch_api as bagua
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.job.session import current

DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int32": torch.int32, "int64": torch.int64, "uint8": torch.uint8,
}  # fmt: skip
KINDS = (
    *["allreduce"] * 6, *["allreduce_inplace"] * 3, "broadcast", "reduce", "allgather", "gather", "scatter",
    "reduce_scatter", "alltoall", "ring", "barrier", "group",
)  # fmt: skip
SAME_EVERYWHERE = ("allreduce", "allreduce_inplace", "broadcast", "allgather")
ROUND = 40  # operations between two looks at the clock and at the digests
LOOK = 1024  # elements at the beginning, somewhere in the middle and at the end that are checked
WITH_CODEC = "codec" in inspect.signature(bagua.allreduce).parameters


class Soak:
    def __init__(self, seed, max_bytes):
        self.draw = random.Random(seed)  # the same on all ranks
        self.max_bytes = max_bytes
        self.rank, self.world = bagua.get_rank(), bagua.get_world_size()
        self.session = current()
        self.hosts = len(self.session.membership.hosts)
        self.everyone = list(range(self.world))
        self.members, self.group = self.everyone, communicators(self.session).world
        self.number, self.groups, self.bytes = 0, 0, 0
        self.digest = 0
        self.wrong = []

    # ---- one operation

    def tensor(self, count, dtype, shared):
        make = bagua.empty if shared else torch.empty
        return make(count, dtype=DTYPES[dtype])

    def input(self, case, rank, first, count):
        values = reference.table(case["dtype"], case["op"], False)
        return reference.window(first, count, rank, case["number"], values)

    def source(self, case, count):
        made = self.tensor(count, case["dtype"], case["shared"][0])
        bits(made)[:] = self.input(case, self.rank, 0, count)
        return made

    def step(self):
        """The next operation of the plan."""
        self.number += 1
        draw, kind = self.draw, self.draw.choice(KINDS)
        dtype = draw.choice(list(DTYPES))
        largest = self.max_bytes if draw.random() < 0.2 or self.number < 8 else self.max_bytes // 16
        nbytes = largest if self.number < 8 else int(2 ** draw.uniform(0, np.log2(largest)))
        case = {
            "kind": kind, "dtype": dtype, "number": self.number, "op": draw.choice(reference.OPS[dtype]),
            "shared": (draw.random() < 0.5, draw.random() < 0.5), "codec": draw.choice(codecs.NAMES),
            "coded": draw.random() < 0.3, "world": draw.random() < 0.5, "share": draw.random(),
        }  # fmt: skip
        members = self.everyone if case["world"] else self.members
        root = draw.randrange(len(members))
        if kind == "group":
            self.regroup()
        elif self.rank in members:
            self.run(case, nbytes // reference.SIZE[dtype] // len(members), members, root)

    def run(self, case, count, members, root):
        comm = communicators(self.session).world if case["world"] else self.group
        result = getattr(self, f"on_{case['kind']}")(case, count, members, comm, root)
        self.bytes += count * len(members) * reference.SIZE[case["dtype"]]
        if result is not None:
            self.check(case, *result)
            if case["world"] and case["kind"] in SAME_EVERYWHERE:
                self.digest = zlib.crc32(bits(result[0]).view(np.uint8), self.digest)

    def regroup(self):
        """Some of the ranks make a communicator of their own; the one before goes."""
        self.groups += 1
        if self.groups > 1 and self.rank in self.members:
            self.session.connection.destroy_comm(self.group.id)
        size = self.draw.randint(1, self.world)
        self.members = sorted(self.draw.sample(self.everyone, size))
        if self.rank in self.members:
            self.group = Communicator(1_000_000 + self.groups, self.members, self.rank)
            self.session.connection.create_comm(self.group.id, self.group.ranks)

    # ---- kinds: (result, function from (first, count) to (what is right, how far a result may lie))

    def on_barrier(self, case, count, members, comm, root):
        bagua.barrier(comm)

    def on_allreduce(self, case, count, members, comm, root):
        result = self.tensor(count, case["dtype"], case["shared"][1])
        if WITH_CODEC and case["coded"] and case["dtype"] == "float32" and case["op"] in ("SUM", "AVG"):
            codec = codecs.python_codec(case["codec"])
            bagua.allreduce(self.source(case, count), result, self.op(case), comm, codec=codec)
            return None if self.hosts > 1 else (result, self.reduction(case, members))
        bagua.allreduce(self.source(case, count), result, self.op(case), comm)
        return result, self.reduction(case, members)

    def on_allreduce_inplace(self, case, count, members, comm, root):
        result = self.source(case, count)
        bagua.allreduce_inplace(result, self.op(case), comm)
        return result, self.reduction(case, members)

    def on_reduce(self, case, count, members, comm, root):
        result = self.tensor(count, case["dtype"], case["shared"][1])
        bagua.reduce(self.source(case, count), result, root, self.op(case), comm)
        return (result, self.reduction(case, members)) if members[root] == self.rank else None

    def on_reduce_scatter(self, case, count, members, comm, root):
        result = self.tensor(count, case["dtype"], case["shared"][1])
        bagua.reduce_scatter(self.source(case, count * len(members)), result, self.op(case), comm)
        return result, self.reduction(case, members, shift=members.index(self.rank) * count)

    def on_broadcast(self, case, count, members, comm, root):
        result = self.source(case, count)
        bagua.broadcast(result, root, comm)
        return result, self.moves(case, [(0, count, members[root], 0)])

    def on_allgather(self, case, count, members, comm, root):
        result = self.tensor(count * len(members), case["dtype"], case["shared"][1])
        bagua.allgather(self.source(case, count), result, comm)
        return result, self.moves(case, [(i * count, count, rank, 0) for i, rank in enumerate(members)])

    def on_gather(self, case, count, members, comm, root):
        result = self.tensor(count * len(members), case["dtype"], case["shared"][1])
        bagua.gather(self.source(case, count), result, root, comm)
        places = [(i * count, count, rank, 0) for i, rank in enumerate(members)]
        return (result, self.moves(case, places)) if members[root] == self.rank else None

    def on_scatter(self, case, count, members, comm, root):
        result = self.tensor(count, case["dtype"], case["shared"][1])
        bagua.scatter(self.source(case, count * len(members)), result, root, comm)
        return result, self.moves(case, [(0, count, members[root], members.index(self.rank) * count)])

    def on_alltoall(self, case, count, members, comm, root):
        result = self.tensor(count * len(members), case["dtype"], case["shared"][1])
        bagua.alltoall(self.source(case, count * len(members)), result, comm)
        at = members.index(self.rank) * count
        return result, self.moves(case, [(i * count, count, rank, at) for i, rank in enumerate(members)])

    def on_ring(self, case, count, members, comm, root):
        me, n = members.index(self.rank), len(members)
        if n == 1:
            return None
        source, result = self.source(case, count), self.tensor(count, case["dtype"], case["shared"][1])
        if me % 2 == 0:
            bagua.send(source, (me + 1) % n, comm)
        bagua.recv(result, (me - 1) % n, comm)
        if me % 2 == 1:
            bagua.send(source, (me + 1) % n, comm)
        return result, self.moves(case, [(0, count, members[(me - 1) % n], 0)])

    # ---- what is right

    @staticmethod
    def op(case):
        return bagua.ReduceOp[case["op"]]

    def reduction(self, case, members, shift=0):
        def expect(first, count):
            parts = [self.input(case, rank, first + shift, count) for rank in members]
            want, magnitude = reference.reduced(parts, case["op"], case["dtype"])
            return want, reference.bound(case["dtype"], case["op"], len(members), self.hosts, want, magnitude)

        return expect

    def moves(self, case, places):
        def expect(first, count):
            found = np.empty(count, reference.STORED[case["dtype"]])
            for at, length, rank, start in places:
                low, high = max(at, first), min(at + length, first + count)
                if low < high:
                    found[low - first : high - first] = self.input(case, rank, start + low - at, high - low)
            return reference.from_bits(found, case["dtype"]), np.zeros(count)

        return expect

    def check(self, case, result, expect):
        total = result.numel()
        middle = int(case["share"] * max(0, total - LOOK))
        for first in sorted({0, middle, max(0, total - LOOK)}):
            count = min(LOOK, total - first)
            got = reference.from_bits(bits(result)[first : first + count], case["dtype"])
            index, _ = reference.compare(got, *expect(first, count)) if count else (-1, 0.0)
            if index >= 0:
                self.wrong.append(f"{case}: rank {self.rank}: element {first + index} of {total} is {got[index]!r}")

    # ---- rounds

    def go_on(self, deadline):
        """True if it is not over: rank 0's clock decides, and anything wrong anywhere ends it."""
        flag = torch.tensor([int(self.rank == 0 and time.monotonic() > deadline) + 2 * bool(self.wrong)])
        bagua.allreduce_inplace(flag, bagua.ReduceOp.MAX)
        return not flag.item()

    def same_everywhere(self):
        digests = torch.tensor([self.digest, -self.digest])
        bagua.allreduce_inplace(digests, bagua.ReduceOp.MAX)
        if digests[0] != -digests[1]:
            self.wrong.append(f"rank {self.rank}: results differ between ranks, before operation {self.number}")


def bits(tensor):
    """The memory of a tensor; bfloat16 as uint16."""
    plain = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return plain.numpy().view(np.uint16) if tensor.dtype is torch.bfloat16 else plain.numpy()


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
        soak.same_everywhere()
    found = {"operations": soak.number, "bytes": soak.bytes, "groups": soak.groups, "wrong": soak.wrong[:5]}
    (folder / f"rank-{soak.rank}.json").write_text(json.dumps(found))
    bagua.barrier()
    bagua.destroy_process_group()
    sys.exit(1 if soak.wrong else 0)


if __name__ == "__main__":
    main()
