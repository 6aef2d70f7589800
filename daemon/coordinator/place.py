"""A coordinator's place among those of its database: what others know of it, and what it knows of them."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from bagua.daemon.coordinator.clock import ServiceClock
from bagua.daemon.coordinator.domain import CoordinatorRecord
from bagua.daemon.coordinator.neighbours import RESYNC_S, Neighbours
from bagua.daemon.coordinator.standing import Standing, this_machine

T = TypeVar("T")


class Place:
    """``neighbours``: None where no other coordinator uses the database. ``refuses`` tells whether the port of the
    database refuses connections. ``missed_s``: after so long without a beat others may soon take this one for dead."""

    def __init__(
        self,
        owner: str,
        clock: ServiceClock,
        neighbours: Neighbours | None,
        standing: Standing,
        refuses: Callable[[], Awaitable[bool]] | None,
        missed_s: float,
    ) -> None:
        self._clock = clock
        self._neighbours = neighbours
        self._standing = standing
        self._refuses = refuses
        self._missed_s = missed_s
        self._own = CoordinatorRecord(owner, machine=this_machine())
        self._announced: CoordinatorRecord | None = None  # as the database has it
        self._blind_since = math.inf  # by the service clock: since then the database was asked in vain
        self.arrived_clock = -math.inf
        """For some time from then on this coordinator gives nobody up: see ``Options.gone_at``."""

    def publish(self, address: str) -> None:
        """Others may be told that this coordinator is there; empty: they can't know where."""
        moved = self._own.address not in ("", address)
        self._own = replace(self._own, address=address)
        if moved:  # daemons ask at the old address
            self._arrive()

    def _arrive(self) -> None:
        """Daemons may have been told that there is no such coordinator."""
        self.arrived_clock = self._clock.now()
        self._own = replace(self._own, arrived_clock=self.arrived_clock)

    def found(self, began: float, coordinators: Sequence[CoordinatorRecord]) -> None:
        """At the start, after ``Neighbours.observe``. Others know of this one if it lived as long as any of them, a
        lease aside. ``began``: see ``Standing.looked``."""
        owner = self._own.owner
        known = next((one for one in coordinators if one.owner == owner), None)
        others = [one.clock for one in coordinators if one.owner != owner]
        if known is not None:
            self._announced = known
            self._own = replace(known, machine=self._own.machine)
            self.arrived_clock = known.arrived_clock or -math.inf
        if others and (known is None or known.clock + self._missed_s < max(others)):
            self._arrive()
        self._look_around(began, coordinators)

    def looked(self, began: float, coordinators: Sequence[CoordinatorRecord], alone: bool) -> None:
        """Later, after ``Neighbours.observe``; ``alone``: as that one said before."""
        if not alone and self._missed_s < self._standing.silent_s < math.inf:
            self._arrive()
        self._look_around(began, coordinators)

    def _look_around(self, began: float, coordinators: Sequence[CoordinatorRecord]) -> None:
        assert self._neighbours is not None
        living = self._neighbours.living()
        self._standing.looked(began, self._own, (one for one in coordinators if one.owner in living))

    async def answer(self, asked: Awaitable[T]) -> T:
        """Waits for the database. While it does not answer it may answer others neither: they are not blamed for that
        time."""
        self._blind_since = min(self._blind_since, self._clock.now())
        answer = await asked
        blind_s = self._clock.now() - self._blind_since
        self._blind_since = math.inf
        if self._neighbours is not None and blind_s > RESYNC_S:
            self._neighbours.put_forward(blind_s)
        return answer

    def announcement(self) -> CoordinatorRecord | None:
        """What the database does not have of this coordinator."""
        known = self._announced
        same = known is not None and replace(self._own, clock=known.clock) == known
        return None if same or self._neighbours is None else self._own

    def now(self) -> float:
        """For ``began``."""
        return self._standing.now()

    def wrote(self, began: float, announced: CoordinatorRecord | None) -> None:
        """A beat is written, and what was announced."""
        self._standing.wrote(began)
        self._announced = announced or self._announced

    async def failed(self) -> None:
        """The database could not be used."""
        self._standing.failed(self._refuses is not None and await self._refuses())
