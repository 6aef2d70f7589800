"""Messages between two ranks of a group: by tag, and from whoever comes first."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch.distributed.distributed_c10d import Store

from bagua.base.errors import CommunicationError
from bagua.c10d.lanes import THREADS, Lane
from bagua.c10d.tensors import carried, flat
from bagua.c10d.work import Operation, run_within
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.members import hashed_number
from bagua.torch_api.job.session import current

POLL_S = 0.0005
Route = tuple[int, int, int]  # Source and destination, as positions in the group, and the tag


class Messages:
    """Messages of one group. Each route has a communicator of its own, and messages on it go in their order: what waits
    on one route holds up no other one.

    A sender also counts its messages in the group's store. Nobody reads that but a receiver that takes from any source.
    """

    def __init__(self, store: Store, everyone: Communicator, timeout: Callable[[], float]) -> None:
        """``timeout``: seconds that messages have which are begun now."""
        self._store = store
        self._everyone = everyone
        self._connection = current().connection
        self._rank = everyone.rank()
        self._size = everyone.nranks()
        self._timeout = timeout
        self._lanes: dict[Route, Lane] = {}
        self._communicators: dict[Route, Communicator] = {}
        self._taken: Counter[Route] = Counter()  # messages for which this rank has called recv
        self._broken: dict[Route, CommunicationError] = {}

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Operation:
        """Begins to send ``tensor``, and does not wait."""
        self._check(to, "to")
        route = self._rank, to, tag
        with flat(tensor) as given:
            whole = carried(given)
        self._store.add(_key(route), 1)
        return self._start("send", tensor, route, lambda one: one.send(whole, self._there(route)))

    def recv(self, tensor: torch.Tensor, source: int, tag: int, deadline: float = math.inf) -> Operation:
        """Begins to receive into ``tensor``. ``deadline``: of ``time.monotonic``, beside the timeout."""
        self._check(source, "from")
        route = source, self._rank, tag
        self._taken[route] += 1

        def run(one: Communicator) -> None:
            with flat(tensor, changes=True) as whole:
                one.recv(carried(whole), self._there(route))

        operation = self._start("recv", tensor, route, run, deadline)
        operation.source = source
        return operation

    def _start(
        self,
        name: str,
        tensor: torch.Tensor,
        route: Route,
        run: Callable[[Communicator], None],
        deadline: float = math.inf,
    ) -> Operation:
        seconds = self._timeout()
        deadline = min(deadline, time.monotonic() + seconds)  # however long it waits for those before it

        def within() -> None:
            if route in self._broken:
                raise self._broken[route]
            try:
                run_within(self._connection, name, seconds, deadline, lambda: run(self._on(route)))
            except CommunicationError as error:
                self._broken[route] = error  # what comes after it would meet another message
                raise

        operation = Operation(name, [tensor], within, seconds)
        self._lane(route).put(operation.run)
        return operation

    def recv_any(self, tensor: torch.Tensor, tag: int) -> Operation:
        """Begins to receive from whoever sends first. ``Operation.source`` says who it was."""

        seconds = self._timeout()
        deadline = time.monotonic() + seconds

        def run() -> None:
            operation.source = source = self._await_any(tag, seconds, deadline)
            self.recv(tensor, source, tag, deadline).wait()

        operation = Operation("recv", [tensor], run, seconds)
        self._lane((-1, self._rank, tag)).put(operation.run)
        return operation

    def _await_any(self, tag: int, seconds: float, deadline: float) -> int:
        """The first rank with a message for which no recv was called."""
        others = [rank for rank in range(self._size) if rank != self._rank]
        while True:
            for source in others:
                route = source, self._rank, tag
                if self._store.add(_key(route), 0) > self._taken[route]:
                    return source
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"recv was not done within its timeout of {seconds:g} s. Rank {self._rank} of the group has been "
                    f"waiting for a message with tag {tag} from any rank. [BG503]"
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
        """Returns the route's communicator. Both ends choose the number alike, without asking each other."""
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
        """Frees the communicators."""
        for one in self._communicators.values():
            one.destroy()
        self._communicators.clear()


def _key(route: Route) -> str:
    return "bagua sent {} {} {}".format(*route)
