"""The node's lease: until when the coordinator certainly counts on this node.

The coordinator gives a node up when it has not heard of it for some time, and may then run its jobs again elsewhere. So
a daemon that can't be sure to be heard ends its ranks first: a job never runs twice. Only the moment of *sending*
something that was acknowledged later counts: the coordinator has heard of the node then, or after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from bagua.base.machine_clock import Standstill
from bagua.proto import node_pb2


class Lease:
    """Times are those of ``boottime``. ``on_change`` is called when a ``deadline`` may have moved, or this process has
    stood still."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self.standstill = Standstill()
        # When the newest heartbeat was sent that was acknowledged on this stream, after Welcome.
        self.answered = -math.inf
        self._renewed = 0.0
        self._lease_s = 0.0
        self._fence_s = 0.0  # 0: no coordinator has asked for a fence
        self._refusals_until = -math.inf  # so long a refusal renews
        self.coordinators: tuple[str, ...] = ()  # which must refuse, too
        self._known = False
        self._hello_at = 0.0
        self._sent: dict[int, float] = {}  # heartbeats that wait for their acknowledgement
        self._seq = 0

    @property
    def known(self) -> bool:
        """True once a coordinator has told its terms."""
        return self._known

    @property
    def fence_s(self) -> float:
        """Seconds without a renewal after which ranks are ended."""
        return self._fence_s

    def look(self, now: float) -> None:
        """Notes that this process has stood still, if it has."""
        if self.standstill.look(now):
            self._on_change()

    def asks(self, now: float) -> bool:
        """True if nobody gives this node up while coordinators refuse connections."""
        return now < self._refusals_until and self._fence_s > 0

    def deadline(self, patience_s: float = 0.0) -> float:
        """Returns when the ranks of a job must be gone from this node. ``patience_s``: see RunJob."""
        return self._renewed + self._fence_s + patience_s if self._fence_s else math.inf

    def hello(self, now: float) -> None:
        """Notes that a stream begins, whose first message is sent now."""
        self._hello_at = now
        self.answered = -math.inf
        self._sent.clear()
        self._seq = 0

    def welcome(self, welcome: node_pb2.Welcome) -> None:
        """Notes that the coordinator has taken the Hello. Its terms replace the former ones."""
        self._known = True
        self._lease_s = welcome.lease_s
        self._fence_s = welcome.fence_s if 0 < welcome.fence_s < math.inf else 0.0
        self.standstill.matters_to(self._fence_s)
        self._refusals_until = math.inf if welcome.sole else -math.inf
        self.coordinators = ()
        self._heard(self._hello_at, welcome.grant if welcome.HasField("grant") else None)

    def beat(self, now: float) -> int:
        """The number of a heartbeat that is sent now; 0: it needs no acknowledgement, the last one is young."""
        self.look(now)
        if not self._fence_s or now < self._renewed + min(self._lease_s / 2, self._fence_s / 8):
            return 0
        self._seq += 1
        self._sent[self._seq] = now
        return self._seq

    def acknowledged(self, seq: int, grant: node_pb2.LeaseGrant | None = None, welcomed: bool = True) -> None:
        """Notes that the coordinator has taken the heartbeat of that number, and so all before it. ``welcomed``: it has
        written this stream down."""
        sent = self._sent.get(seq)
        if sent is None:
            return
        self._sent = {number: at for number, at in self._sent.items() if number > seq}
        if welcomed:
            self.answered = sent
        self._heard(sent, grant)

    def refused(self, before: float) -> None:
        """Connections that were tried after ``before`` were refused: nobody decides about this node then."""
        if self.asks(before):
            self._renew(before)

    def _heard(self, sent: float, grant: node_pb2.LeaseGrant | None) -> None:
        if grant is None:
            self._renew(sent)
            return
        self._refusals_until = sent + grant.refusals_s
        self.coordinators = tuple(grant.coordinators)
        self._renew(sent - grant.age_s)

    def _renew(self, at: float) -> None:
        self._renewed = max(self._renewed, at)  # a grant may be older than what is known already
        self._on_change()
