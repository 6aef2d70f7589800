"""Stands in for the coordinator of an elastic job that loses members, in tests that host engines themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any


class Regrouper:
    """Knows the members of a job, and makes the next generation of those that are left."""

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        """``hosts``: member numbers on every host."""
        self._lock = threading.Lock()  # one generation is made after the other
        self.generation = 1
        self.hosts = {index: list(members) for index, members in enumerate(hosts)}
        self.engines: dict[int, Any] = {}
        self.on_regroup: Callable[[int], None] = lambda generation: None

    def suspended(self, event: dict[str, Any]) -> None:
        """An engine has told that its generation is suspended. Where it says who was lost, the others go on."""
        member = event["rank"]
        if member >= 0:
            self.lose([member])

    def lose(self, gone: Sequence[int]) -> None:
        """The next generation, without these members. Nothing where all have been lost before."""
        with self._lock:
            if not any(member in members for members in self.hosts.values() for member in gone):
                return
            left = {index: [m for m in members if m not in gone] for index, members in self.hosts.items()}
            self.hosts = {index: members for index, members in left.items() if members}
            self._regroup()

    def again(self) -> None:
        """The next generation, of the same members: a link broke."""
        with self._lock:
            self._regroup()

    def _regroup(self) -> None:
        self.generation += 1
        members = [member for ranks in self.hosts.values() for member in ranks]
        hosts, first = [], 0
        for ranks in self.hosts.values():
            hosts.append(list(range(first, first + len(ranks))))
            first += len(ranks)
        for place, index in enumerate(self.hosts):
            self.engines[index].regroup(generation=self.generation, host_index=place, hosts=hosts, members=members)
        if len(self.hosts) > 1:
            for index in self.hosts:
                self.engines[index].set_peers([self.engines[other].address() for other in self.hosts])
        self.on_regroup(self.generation)
