"""Every primitive, on every rank, compared with a result that one process computes.

    python -m bagua.distributed.launch --nproc_per_node=4 -m bagua.examples.communication_primitives
    bagua run --nnodes 2 --nproc-per-node 2 -m bagua.examples.communication_primitives

Ends with exit code 1 if a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import bagua.torch_api as bagua
from bagua.torch_api.communication import (
    allreduce_coalesced_inplace,
    broadcast_coalesced,
    broadcast_object,
    new_group,
)

COUNT = 12  # Elements for each rank
OPERATIONS = (bagua.ReduceOp.SUM, bagua.ReduceOp.PRODUCT, bagua.ReduceOp.MIN, bagua.ReduceOp.MAX, bagua.ReduceOp.AVG)


class Checks:
    """The primitives and their results; ``of``: the data of any rank, known to all."""

    def __init__(self) -> None:
        self.rank, self.ranks = bagua.get_rank(), bagua.get_world_size()
        self.everybody = range(self.ranks)

    def of(self, rank: int, parts: int = 1) -> Tensor:
        """float32 [parts * COUNT], whole numbers near one, so that products stay exact."""
        return (torch.arange(parts * COUNT) + rank).remainder(3).float() + 1

    def mine(self, parts: int = 1) -> Tensor:
        return self.of(self.rank, parts)

    def part(self, tensor: Tensor, place: int) -> Tensor:
        return tensor[place * COUNT : (place + 1) * COUNT]

    def reduced(self, op: bagua.ReduceOp, parts: int = 1) -> Tensor:
        stacked = torch.stack([self.of(rank, parts) for rank in self.everybody])
        results: dict[int, Callable[[], Tensor]] = {
            bagua.ReduceOp.SUM: lambda: stacked.sum(0),
            bagua.ReduceOp.PRODUCT: lambda: stacked.prod(0),
            bagua.ReduceOp.MIN: lambda: stacked.min(0).values,
            bagua.ReduceOp.MAX: lambda: stacked.max(0).values,
            bagua.ReduceOp.AVG: lambda: stacked.mean(0),
        }
        return results[op]()

    def joined(self) -> Tensor:
        return torch.cat([self.of(rank) for rank in self.everybody])

    def send_recv(self) -> bool:
        """Sends to the next rank, round the ring."""
        before, after = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        found = torch.zeros(COUNT)
        if self.ranks == 1:
            return True
        if self.rank % 2:  # half of the ranks receive first: nobody waits for a rank that waits
            bagua.recv(found, before)
            bagua.send(self.mine(), after)
        else:
            bagua.send(self.mine(), after)
            bagua.recv(found, before)
        return torch.equal(found, self.of(before))

    def broadcast(self) -> bool:
        found, more = self.mine(), [self.mine(), self.mine(2).double()]
        bagua.broadcast(found, src=self.ranks - 1)
        broadcast_coalesced(more, src=0)
        word = broadcast_object({"from": self.rank}, src=self.ranks - 1)
        right = torch.equal(found, self.of(self.ranks - 1)) and word == {"from": self.ranks - 1}
        return right and torch.equal(more[0], self.of(0)) and torch.equal(more[1], self.of(0, 2).double())

    def allreduce(self) -> bool:
        right = True
        for op in OPERATIONS:
            found, again = torch.zeros(COUNT), self.mine()
            bagua.allreduce(self.mine(), found, op)
            bagua.allreduce_inplace(again, op)
            right &= torch.allclose(found, self.reduced(op)) and torch.equal(found, again)
        several = [self.mine(), self.mine()]
        allreduce_coalesced_inplace(several)
        return right and all(torch.equal(one, self.reduced(bagua.ReduceOp.SUM)) for one in several)

    def reduce(self) -> bool:
        last, found, again = self.ranks - 1, torch.zeros(COUNT), self.mine()
        bagua.reduce(self.mine(), found, last, bagua.ReduceOp.MAX)
        bagua.reduce_inplace(again, last, bagua.ReduceOp.MAX)
        wanted = self.reduced(bagua.ReduceOp.MAX)
        return self.rank != last or (torch.equal(found, wanted) and torch.equal(again, wanted))

    def allgather(self) -> bool:
        found, again = torch.zeros(self.ranks * COUNT), torch.zeros(self.ranks * COUNT)
        self.part(again, self.rank).copy_(self.mine())
        bagua.allgather(self.mine(), found)
        bagua.allgather_inplace(again)
        return torch.equal(found, self.joined()) and torch.equal(again, self.joined())

    def gather(self) -> bool:
        found, again = torch.zeros(self.ranks * COUNT), torch.zeros((self.ranks if self.rank == 0 else 1) * COUNT)
        self.part(again, 0).copy_(self.mine())
        bagua.gather(self.mine(), found, 0)
        bagua.gather_inplace(again, COUNT, 0)
        return self.rank != 0 or (torch.equal(found, self.joined()) and torch.equal(again, self.joined()))

    def scatter(self) -> bool:
        found, again = torch.zeros(COUNT), self.mine(self.ranks if self.rank == 0 else 1)
        bagua.scatter(self.mine(self.ranks), found, 0)
        bagua.scatter_inplace(again, COUNT, 0)
        wanted = self.part(self.of(0, self.ranks), self.rank)
        return torch.equal(found, wanted) and torch.equal(self.part(again, 0), wanted)

    def reduce_scatter(self) -> bool:
        found, again = torch.zeros(COUNT), self.mine(self.ranks)
        bagua.reduce_scatter(self.mine(self.ranks), found)
        bagua.reduce_scatter_inplace(again)
        wanted = self.part(self.reduced(bagua.ReduceOp.SUM, self.ranks), self.rank)
        return torch.equal(found, wanted) and torch.equal(self.part(again, self.rank), wanted)

    def alltoall(self) -> bool:
        found, again = torch.zeros(self.ranks * COUNT), self.mine(self.ranks)
        bagua.alltoall(self.mine(self.ranks), found)
        bagua.alltoall_inplace(again)
        wanted = torch.cat([self.part(self.of(rank, self.ranks), self.rank) for rank in self.everybody])
        return torch.equal(found, wanted) and torch.equal(again, wanted)

    def alltoall_v(self) -> bool:
        """Sends r + 1 elements to each rank r."""
        counts = [rank + 1 for rank in self.everybody]
        places = [rank * COUNT for rank in self.everybody]
        received = [self.rank + 1] * self.ranks
        found = torch.zeros(self.ranks * COUNT)
        bagua.alltoall_v(self.mine(self.ranks), counts, places, found, received, places)
        again = self.mine(self.ranks)
        bagua.alltoall_v_inplace(again, [COUNT] * self.ranks, places)
        parts = [self.part(self.of(rank, self.ranks), self.rank) for rank in self.everybody]
        right = all(
            torch.equal(self.part(found, r)[: self.rank + 1], parts[r][: self.rank + 1]) for r in self.everybody
        )
        return right and torch.equal(again, torch.cat(parts))

    def groups(self) -> bool:
        """Ranks of the same evenness reduce among themselves."""
        members = [rank for rank in self.everybody if rank % 2 == self.rank % 2]
        groups = [  # every rank makes all of them, in the same order
            new_group([rank for rank in self.everybody if rank % 2 == rest]) for rest in range(min(2, self.ranks))
        ]
        found = self.mine()
        bagua.allreduce_inplace(found, comm=groups[self.rank % 2].get_global_communicator())
        return torch.equal(found, torch.stack([self.of(rank) for rank in members]).sum(0))

    def barrier(self) -> bool:
        bagua.barrier()
        return True


def main() -> int:
    """Runs one rank; returns the exit code of the process."""
    bagua.init_process_group()
    checks = Checks()
    methods = (
        *(checks.send_recv, checks.broadcast, checks.allreduce, checks.reduce, checks.allgather, checks.gather),
        *(checks.scatter, checks.reduce_scatter, checks.alltoall, checks.alltoall_v, checks.groups, checks.barrier),
    )
    wrong = 0
    for method in methods:
        right = torch.tensor([method()], dtype=torch.uint8)
        bagua.allreduce_inplace(right, bagua.ReduceOp.MIN)  # wrong on one rank is wrong
        wrong += not right
        if checks.rank == 0:
            print(f"{method.__name__:<15} {'ok' if right else 'WRONG'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
