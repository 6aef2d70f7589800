"""Tells which coordinators on the same database have a lease: who is alive, and may decide.

A coordinator writes its service clock at each beat. Another one believes that it lives as long as it sees that value
change, by its own clock: clocks of different machines are never compared. A beat is written in one transaction with the
ends of sessions, so what a living coordinator has written about its sessions is never older than its beat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.domain import NodeRecord, NodeView, Stored

RESYNC_S = 0.5  # how often to look for what other coordinators have changed


class CoordinatorLeases:
    """The others' leases, as ``owner`` sees them. So long after its last beat a coordinator's sessions don't count
    (``lease_s``), and others may decide about its jobs (``job_lease_s``)."""

    def __init__(self, owner: str, clock: ServiceClock, lease_s: float, job_lease_s: float) -> None:
        self._owner = owner
        self._clock = clock
        self._lease_s = lease_s
        self._job_lease_s = job_lease_s
        self._seen: dict[str, tuple[float, float]] = {}  # owner -> (its beat, when it was seen to change)
        self._silent = False

    def observe(self, beats: Mapping[str, float]) -> None:
        """Takes in the beats that the database has now."""
        now = self._clock.now()
        for owner, beat in beats.items():
            if owner not in self._seen or self._seen[owner][0] != beat:
                self._seen[owner] = (beat, now)

    def alone(self, beats: Mapping[str, float]) -> bool:
        """True if no other coordinator lives, or did when this was asked before: since then nothing of theirs can have
        changed, for whatever one writes comes with its beat. ``beats`` are not yet observed."""
        lease_s = max(self._lease_s, self._job_lease_s)
        others = [owner for owner in beats if owner != self._owner]
        same = all(owner in self._seen and self._seen[owner][0] == beats[owner] for owner in others)
        before = self._silent
        self._silent = same and not any(self._within(owner, lease_s) for owner in others)
        return before and self._silent

    def put_forward(self, jump: float) -> None:
        """Gives all leases so many seconds more: the clock jumped, or for so long nothing could be read."""
        self._seen = {owner: (beat, at + jump) for owner, (beat, at) in self._seen.items()}

    def living(self) -> set[str]:
        """Returns the other coordinators that live, or did a moment ago."""
        lease_s = max(self._lease_s, self._job_lease_s)
        return {owner for owner in self._seen if owner != self._owner and self._within(owner, lease_s)}

    def heard(self, owner: str) -> float:
        """Returns when its beat was seen to change, by the service clock of this coordinator."""
        return self._seen.get(owner, (0.0, 0.0))[1]

    def lives(self, owner: str) -> bool:
        """True if its sessions count."""
        return self._within(owner, self._lease_s)

    def may_live(self, owner: str) -> bool:
        """True also if it may have come a moment ago."""
        return owner not in self._seen or self.lives(owner)

    def heard_of(self, node: NodeRecord, view: NodeView | None, now: float) -> float:
        """Returns when a node without a session here was heard of last. 0: only the coordinator that holds its session
        knows. ``view``: what is known of it so far."""
        if self.connected(node):
            return 0.0
        if view is not None and not view.connected:
            return view.heard_clock
        return now if view is None or node.owner is None else self.heard(node.owner)

    def connected(self, node: NodeRecord) -> bool:
        """True if another coordinator, which lives, holds the session of the node."""
        return node.owner is not None and node.owner != self._owner and self.lives(node.owner)

    def orphans(self, jobs: Iterable[Stored]) -> list[str]:
        """Returns the unfinished jobs about which nobody decides."""
        return [
            stored.job.job_id
            for stored in jobs
            if stored.owner != self._owner
            and not stored.job.state.terminal
            and (stored.owner is None or not self._within(stored.owner, self._job_lease_s))
        ]

    def _within(self, owner: str, seconds: float) -> bool:
        return owner in self._seen and self._clock.now() < self.heard(owner) + seconds
