"""A coordinator's place among those of its database: what others know of it, and what it knows of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.coordinator_leases import RESYNC_S, Neighbours
from bagua.daemon.coordinator.rules.domain import CoordinatorRecord
from bagua.daemon.coordinator.rules.node_leases import Standing

ASK_EVERY_S = 1.0

T = TypeVar("T")


class Place:
    """``neighbours``: None where no other coordinator uses the database. ``refuses`` tells whether the port of the
    database refuses connections. ``missed_s``: after so long without a beat others may soon take this one for dead.
    ``put_forward`` moves the times at which nodes without a session were heard of."""

    def __init__(
        self,
        owner: str,
        clock: ServiceClock,
        neighbours: Neighbours | None,
        standing: Standing,
        refuses: Callable[[], Awaitable[bool]] | None,
        missed_s: float,
        put_forward: Callable[[float], None],
    ) -> None:
        self._clock = clock
        self._neighbours = neighbours
        self._standing = standing
        self._refuses = refuses
        self._missed_s = missed_s
        self._put_forward = put_forward
        self._own = CoordinatorRecord(owner)
        self._announced: CoordinatorRecord | None = None  # as the database has it
        self._blind_since = math.inf  # by the service clock: since then the database was asked in vain
        self.arrived_clock = -math.inf
        """For some time from then on this coordinator gives nobody up: see ``Options.gone_at``."""

    def publish(self, address: str, machine: str) -> None:
        """Others may be told that this coordinator is there; an empty address: they can't know where.
        ``machine``: equal for all that share its loopback."""
        moved = self._own.address not in ("", address)
        self._own = replace(self._own, address=address, machine=machine)
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
            self._own = known
            self.arrived_clock = known.arrived_clock or -math.inf
        if others and (known is None or known.clock + self._missed_s < max(others)):
            self._arrive()
        self._look_around(began, coordinators)

    def held(self, began: float, node_ids: Iterable[str]) -> None:
        """At the start: the former run of this coordinator held sessions of these nodes, as was written."""
        for node_id in node_ids:
            self._standing.holds(node_id)
            self._standing.lets_go([node_id], began)

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
        """Waits for the database. While it does not answer it may answer others neither: they, and their nodes, are not
        blamed for that time."""
        self._blind_since = min(self._blind_since, self._clock.now())
        answer = await asked
        blind_s = self._clock.now() - self._blind_since
        self._blind_since = math.inf
        if self._neighbours is not None and blind_s > RESYNC_S:
            self._neighbours.put_forward(blind_s)
            self._put_forward(blind_s)
        return answer

    @property
    def silent_s(self) -> float:
        """For how long the database was asked in vain: that will count against nodes of nobody else. 0: it answers."""
        blind_s = max(0.0, self._clock.now() - self._blind_since)
        return blind_s if self._neighbours is not None and blind_s > RESYNC_S else 0.0

    async def ask_others(self, ask: Callable[[Mapping[str, str]], Awaitable[Mapping[str, float]]]) -> None:
        """Until cancelled: asks them while the database is silent. Where its port refuses, nobody need be asked.
        ``ask``: see ``SilenceOfOthers.ask``."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            others = self._standing.others
            if others and self.silent_s and not self._standing.refused:
                asked = self._standing.clock()
                self._standing.heard_others(asked, await ask(others))

    def announcement(self) -> CoordinatorRecord | None:
        """Facts of this coordinator that the database does not have."""
        known = self._announced
        same = known is not None and replace(self._own, clock=known.clock) == known
        return None if same or self._neighbours is None else self._own

    def now(self) -> float:
        """For ``began``."""
        return self._standing.now()

    def writes(self, began: float, gone: Iterable[str]) -> None:
        """These sessions' ends are about to be written."""
        self._standing.lets_go(gone, began)

    def wrote(self, began: float, announced: CoordinatorRecord | None, came: Iterable[str] = ()) -> None:
        """A beat is written, what was announced, and that these nodes have sessions here."""
        self._standing.wrote(began)
        for node_id in came:
            self._standing.holds(node_id)
        self._announced = announced or self._announced

    async def failed(self) -> None:
        """The database could not be used."""
        self._standing.failed(self._refuses is not None and await self._refuses())
