"""Grants leases to nodes: for how long they may count on not being given up while coordinators, or their database, are
away.

With SQLite nobody but this coordinator decides. A database server may have other coordinators, so time counts here, by
this machine's clock, from what is certain:

- From the last beat that was written the others count the silence of this coordinator's nodes; of a node whose session
  ended from the writing of that, until its next session is written. While another one does not reach the database
  either, as it says when it is asked, it counts nothing (``OwnLease.await_database``).
- A coordinator that nobody knew of at the last look is a newcomer: it gives nobody up for ``outage_s`` and the time of
  the fence (``Options.gone_at``).
- Where the port of the database refuses connections nobody uses it. That time counts for nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from bagua.base.address import is_loopback, split_address
from bagua.base.machine_clock import boottime
from bagua.daemon.coordinator.rules.domain import CoordinatorRecord
from bagua.proto import node_pb2


class NodeLeases:
    """The leases of all nodes with a session here. ``shared``: the database may have other coordinators. Use from one
    event loop."""

    def __init__(self, shared: bool = False, outage_s: float = 0.0, clock: Callable[[], float] = boottime) -> None:
        self._shared = shared
        self._outage_s = outage_s  # a newcomer gives nobody up for so long
        self._clock = clock  # seconds, also while the machine is suspended
        self._refused_s = 0.0  # for how many seconds the database has refused, all in all
        self._refused_at: float | None = None  # when the last try was refused, by the clock; None: it was not
        self._written = -math.inf  # by ``now``: when the transaction of the last beat began
        self._looked = -math.inf  # by ``now``: when the other coordinators were looked for last
        self._alone = False  # no other one lived then
        # Addresses of all coordinators: daemons may dial that of another one, or of a balancer. Empty: a coordinator
        # that is alone does not know its own. None: the address of one of several is not known.
        self._addresses: list[str] | None = []
        self._others: dict[str, str] | None = {}  # the others' addresses, by name; None: not all of them are known
        self._still_s = 0.0  # seconds since the last beat in which no other coordinator counted
        self._counted = -math.inf  # by the clock; time before it is in one of the sums, or will be in none
        self._left: dict[str, float] = {}  # node -> when its session's end may first have been written; inf: it was not

    def clock(self) -> float:
        """Returns the time for ``heard_others``."""
        return self._clock()

    def now(self) -> float:
        """Returns the seconds during which somebody may have used the database."""
        return self._clock() - self._refused_s

    @property
    def silent_s(self) -> float:
        """Seconds in which this coordinator has written no beat that others could see."""
        return self.now() - self._written

    def wrote(self, began: float) -> None:
        """Notes that a beat is written, in a transaction that began at that time of ``now``."""
        self._written = began
        self._reached()

    def _reached(self) -> None:
        """Notes an answer of the database: others may count again from now on."""
        if self._still_s:
            self._left = {node_id: at + self._still_s for node_id, at in self._left.items()}
        self._still_s = 0.0
        self._counted = self._clock()
        self._refused_at = None

    def refreshed(self, began: float, own: CoordinatorRecord, others: Iterable[CoordinatorRecord]) -> None:
        """Takes in the others that live, or lived a moment ago, as of that time of ``now``."""
        others = list(others)
        self._looked = began
        self._written += self._still_s
        self._reached()
        self._alone = not others
        known = {one.owner: address for one in (own, *others) if (address := _reached_at(one, own.machine))}
        complete = len(known) == 1 + len(others)
        self._addresses = list(known.values()) if complete or self._alone else None
        self._others = {owner: at for owner, at in known.items() if owner != own.owner} if complete else None

    @property
    def others(self) -> Mapping[str, str]:
        """Address of each of the others by its name, if all of them can be asked; else empty."""
        return self._others or {}

    @property
    def refused(self) -> bool:
        """True if the port of the database refused the last try."""
        return self._refused_at is not None

    def heard_others(self, asked: float, silent: Mapping[str, float]) -> None:
        """Takes in for how many seconds each of ``others`` has not reached the database, as it said when it was asked
        after that time of ``clock``."""
        if not silent or silent.keys() != self.others.keys():
            return
        began = max(self._counted, self._clock() - min(silent.values()))
        if began < asked:
            self._still_s += asked - began
            self._counted = asked

    def session_began(self, node_id: str) -> None:
        """Notes that the database has a session of the node with this coordinator."""
        self._left[node_id] = math.inf

    def sessions_ended(self, node_ids: Iterable[str], began: float) -> None:
        """Notes that the ends of these sessions are being written, in a transaction that began then, by ``now``."""
        for node_id in node_ids:
            self._left[node_id] = min(self._left.get(node_id, -math.inf), began)

    def failed(self, refused: bool) -> None:
        """Notes that the database could not be used; ``refused``: its port refuses connections."""
        now = self._clock()
        if refused and self._refused_at is not None:
            self._refused_s += now - max(self._refused_at, self._counted)
            self._counted = now
        self._refused_at = now if refused else None

    def grant(self, node_id: str) -> node_pb2.LeaseGrant | None:
        """Returns what the daemon on that node may count on. None: nobody else decides."""
        if not self._shared:
            return None
        now = self.now()
        newcomers_s = self._looked + self._outage_s - now  # a newcomer gives nobody up for so long
        age_s = max(0.0, -newcomers_s)
        refusals_s = 0.0 if self._addresses is None else max(0.0, newcomers_s)
        if not self._alone:
            since = min(self._written, self._left.get(node_id, -math.inf))
            age_s = max(age_s, now - since - self._still_s)
            refusals_s = 0.0 if math.isinf(since) else refusals_s
        return node_pb2.LeaseGrant(age_s=age_s, refusals_s=refusals_s, coordinators=self._addresses or ())


def _reached_at(one: CoordinatorRecord, machine: str) -> str:
    """Returns where a daemon that talks to a coordinator of ``machine`` reaches that one. Empty: not known."""
    if not one.address:
        return ""
    host, _ = split_address(one.address)
    return one.address if one.machine == machine or not is_loopback(host) else ""
