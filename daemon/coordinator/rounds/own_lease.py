"""Keeps this coordinator's lease on its database: what others are told of it, and what it is told of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.coordinator_leases import RESYNC_S, CoordinatorLeases
from bagua.daemon.coordinator.rules.domain import CoordinatorRecord
from bagua.daemon.coordinator.rules.node_leases import NodeLeases

ASK_EVERY_S = 1.0

T = TypeVar("T")


class OwnLease:
    """The lease of one run. ``coordinators``: None where no other coordinator uses the database. ``nodes`` learns what
    becomes of the database. ``refuses`` tells whether the port of the database refuses connections. ``missed_s``: after
    so long without a beat others may soon take this one for dead. ``put_forward`` moves the times at which nodes that
    have no session were heard of."""

    def __init__(
        self,
        owner: str,
        clock: ServiceClock,
        coordinators: CoordinatorLeases | None,
        nodes: NodeLeases,
        refuses: Callable[[], Awaitable[bool]] | None,
        missed_s: float,
        put_forward: Callable[[float], None],
    ) -> None:
        self._clock = clock
        self._coordinators = coordinators
        self._nodes = nodes
        self._refuses = refuses
        self._missed_s = missed_s
        self._put_forward = put_forward
        self._own = CoordinatorRecord(owner)
        self._announced: CoordinatorRecord | None = None  # as the database has it
        self._blind_since = math.inf  # by the service clock: since then the database was asked in vain
        self.arrived_clock = -math.inf
        """Time from which this coordinator gives nobody up for a while: see ``Options.gone_at``."""

    def publish(self, address: str, machine: str) -> None:
        """Lets others be told where this coordinator is; an empty address: they can't know. ``machine``: equal for all
        that share its loopback."""
        moved = self._own.address not in ("", address)
        self._own = replace(self._own, address=address, machine=machine)
        if moved:  # daemons ask at the old address
            self._arrive()

    def _arrive(self) -> None:
        """Counts this coordinator as new: daemons may have been told that there is no such coordinator."""
        self.arrived_clock = self._clock.now()
        self._own = replace(self._own, arrived_clock=self.arrived_clock)

    def loaded(self, began: float, coordinators: Sequence[CoordinatorRecord]) -> None:
        """Takes in the records at the start, after ``CoordinatorLeases.observe``. Others know of this one if it
        lived as long as any of them, a lease aside. ``began``: see ``NodeLeases.refreshed``."""
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

    def held_before(self, began: float, node_ids: Iterable[str]) -> None:
        """Takes in, at the start, the nodes whose sessions the former run of this coordinator held, as was written."""
        for node_id in node_ids:
            self._nodes.session_began(node_id)
            self._nodes.sessions_ended([node_id], began)

    def refreshed(self, began: float, coordinators: Sequence[CoordinatorRecord], alone: bool) -> None:
        """Takes in the records later, after ``CoordinatorLeases.observe``; ``alone``: as that one said before."""
        if not alone and self._missed_s < self._nodes.silent_s < math.inf:
            self._arrive()
        self._look_around(began, coordinators)

    def _look_around(self, began: float, coordinators: Sequence[CoordinatorRecord]) -> None:
        assert self._coordinators is not None
        living = self._coordinators.living()
        self._nodes.refreshed(began, self._own, (one for one in coordinators if one.owner in living))

    async def await_database(self, asked: Awaitable[T]) -> T:
        """Waits for an answer of the database. Nobody is blamed for a time in which it gives none: others, and their
        nodes, may have got none either."""
        self._blind_since = min(self._blind_since, self._clock.now())  # of several tries in vain the first one counts
        answer = await asked
        blind_s = self._clock.now() - self._blind_since
        self._blind_since = math.inf
        if self._coordinators is not None and blind_s > RESYNC_S:
            self._coordinators.put_forward(blind_s)
            self._put_forward(blind_s)
        return answer

    @property
    def silent_s(self) -> float:
        """Seconds in which the database was asked in vain, which will count against nodes of nobody else. 0: it
        answers."""
        blind_s = max(0.0, self._clock.now() - self._blind_since)
        return blind_s if self._coordinators is not None and blind_s > RESYNC_S else 0.0

    async def ask_others(self, ask: Callable[[Mapping[str, str]], Awaitable[Mapping[str, float]]]) -> None:
        """Asks them while the database is silent, until cancelled. Where its port refuses, nobody need be asked.
        ``ask``: see ``DatabaseSilence.ask``."""
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            others = self._nodes.others
            if others and self.silent_s and not self._nodes.refused:
                asked = self._nodes.clock()
                self._nodes.heard_others(asked, await ask(others))

    def announcement(self) -> CoordinatorRecord | None:
        """Returns the record of this coordinator if the database has it otherwise."""
        known = self._announced
        same = known is not None and replace(self._own, clock=known.clock) == known
        return None if same or self._coordinators is None else self._own

    def now(self) -> float:
        """Returns the time for ``began``."""
        return self._nodes.now()

    def writes(self, began: float, gone: Iterable[str]) -> None:
        """Notes that the ends of these nodes' sessions are about to be written."""
        self._nodes.sessions_ended(gone, began)

    def wrote(self, began: float, announced: CoordinatorRecord | None, came: Iterable[str] = ()) -> None:
        """Notes that a beat is written, what was announced, and that these nodes have sessions here."""
        self._nodes.wrote(began)
        for node_id in came:
            self._nodes.session_began(node_id)
        self._announced = announced or self._announced

    async def failed(self) -> None:
        """Notes that the database could not be used."""
        self._nodes.failed(self._refuses is not None and await self._refuses())
