"""Messages between two ranks of a group: by tag, and from whoever comes first."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import Store

from bagua.base.errors import CommunicationError
from bagua.c10d.lanes import THREADS, Lane
from bagua.c10d.work import Operation
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.members import hashed_number

POLL_S = 0.0005
Route = tuple[int, int, int]
"""Source and destination, as positions in the group, and the tag."""


class Messages:
    """Those of one group. Each route has a communicator of its own, and messages on it go in their order: what waits on
    one route holds up no other one.

    A sender also counts its messages in the group's store. Nobody reads that but a receiver that takes from any source.
    """

    def __init__(self, store: Store, everyone: Communicator, timeout: float) -> None:
        self._store = store
        self._everyone = everyone
        self._rank = everyone.rank()
        self._size = everyone.nranks()
        self._timeout = timeout
        self._lanes: dict[Route, Lane] = {}
        self._communicators: dict[Route, Communicator] = {}
        self._taken: Counter[Route] = Counter()  # messages for which this rank has called recv

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Operation:
        """Begins to send ``tensor`` (contiguous, of a dtype that travels)."""
        self._check(to, "to")
        route = self._rank, to, tag
        lane = self._lane(route)
        self._store.add(_key(route), 1)
        operation = Operation("send", [tensor], lambda: self._on(route).send(tensor, self._there(route)), self._timeout)
        lane.put(operation.run)
        return operation

    def recv(self, tensor: torch.Tensor, source: int, tag: int) -> Operation:
        """Begins to receive into ``tensor``."""
        self._check(source, "from")
        route = source, self._rank, tag
        self._taken[route] += 1
        operation = Operation("recv", [tensor], lambda: self._on(route).recv(tensor, self._there(route)), self._timeout)
        operation.source = source
        self._lane(route).put(operation.run)
        return operation

    def recv_any(self, tensor: torch.Tensor, tag: int) -> Operation:
        """Begins to receive from whoever sends first. ``Operation.source`` says who it was."""

        def run() -> None:
            operation.source = source = self._await_any(tag)
            received = self.recv(tensor, source, tag)
            received.wait(timedelta(seconds=self._timeout))

        operation = Operation("recv", [tensor], run, self._timeout)
        self._lane((-1, self._rank, tag)).put(operation.run)
        return operation

    def _await_any(self, tag: int) -> int:
        """The first rank with a message for which no recv was called."""
        deadline = time.monotonic() + self._timeout
        others = [rank for rank in range(self._size) if rank != self._rank]
        while True:
            for source in others:
                route = source, self._rank, tag
                if self._store.add(_key(route), 0) > self._taken[route]:
                    return source
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"Rank {self._rank} of the group received nothing with tag {tag} from any rank in "
                    f"{self._timeout:.0f} s. [BG503]"
                )
            time.sleep(POLL_S)

    def _check(self, peer: int, word: str) -> None:
        if not 0 <= peer < self._size or peer == self._rank:
            raise ValueError(
                f"Rank {self._rank} of the group of {self._size} can't communicate {word} rank {peer}: name one of the "
                f"other {self._size - 1}. [BG404]"
            )

    def _lane(self, route: Route) -> Lane:
        return self._lanes.setdefault(route, Lane(THREADS))

    def _on(self, route: Route) -> Communicator:
        """Its communicator. Both ends choose the number alike, without asking each other."""
        if route not in self._communicators:
            source, to, tag = route
            everyone = self._everyone
            number = hashed_number(f"c10d message {everyone.id} {source} {to} {tag}")
            ranks = sorted((everyone.ranks[source], everyone.ranks[to]))
            me = everyone.ranks[self._rank]
            self._communicators[route] = Communicator(number, ranks, me, everyone.connection)
        return self._communicators[route]

    def _there(self, route: Route) -> int:
        """Position of the other end in the route's communicator, whose ranks ascend."""
        source, to, _ = route
        other = to if source == self._rank else source
        return int(other > self._rank)

    def close(self) -> None:
        """Communicators go back."""
        for one in self._communicators.values():
            one.destroy()
        self._communicators.clear()


def _key(route: Route) -> str:
    return "bagua sent {} {} {}".format(*route)
