"""The settings of a coordinator on which decisions depend."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Settings that decisions depend on. ``started_clock``: start of this coordinator, from which every node has
    one full lease, and every waiting job a chance to see nodes come back."""

    lease_s: float = 10.0
    # Nodes are kept for the oldest job that waits after so long: else smaller ones that come later fill them for ever.
    keep_after_s: float = 10.0
    # A lost connection or an aborted collective is often seen before the death that caused it: wait so long for a
    # better cause.
    settle_s: float = 1.0
    # The same for the exit code of a rank that has told why it fails: its node gives it 10 s, and ends it.
    told_s: float = 13.0
    # The same for an elastic job that is suspended while nobody is known to be lost.
    regroup_s: float = 0.2
    # A host that others have lost, and that has said nothing for so long, is out.
    silence_s: float = 5.0
    # Its last word to the coordinator may be younger by so much than the one to its peers.
    last_words_s: float = 1.0
    # The same for one that others would lose, did they wait for it, where daemons fence nothing.
    watched_s: float = 60.0
    # A generation that was suspended within such a time and eight steps, while nobody was lost, has made no progress
    # unless it has made a step. After two of them hosts that can't talk with each other are put out; after so many the
    # job fails, where none accuses another one.
    stall_s: float = 60.0
    max_stalls: int = 5
    # A host that was put out is asked to join after so long, then after twice as long, and so on up to `most_rejoin_s`.
    mend_s: float = 120.0
    # Ranks that were dismissed have so long to end, once the others have gone on; their daemon ends them before, if it
    # can.
    leave_s: float = 90.0
    # Newcomers have so long to get ready; those that are ready wait so long for others of their wave.
    join_s: float = 600.0
    join_wait_s: float = 5.0
    # After newcomers have failed nobody is started for so long, then twice as long, and so on up to the most.
    rejoin_s: float = 60.0
    most_rejoin_s: float = 3_600.0
    # A connected node that has not stopped a job so long after the grace of its ranks is not waited for any more.
    stop_margin_s: float = 30.0
    # Every rank must have been started so long after the placement: a node may have to compile the core first.
    start_s: float = 900.0
    # A daemon that can't renew its lease ends its ranks after so long; those of a job with long steps later, see
    # JobRecord.patience_s. 0: it never does, and is not waited for.
    fence_s: float = 60.0
    started_clock: float = 0.0
    # A coordinator over a database that others have used gives no silent node up for so long, and the time of a fence,
    # from its arrival: daemons may have been told to count on that while they find nobody else.
    outage_s: float = 600.0
    arrived_clock: float = -math.inf

    def gone_s(self, patience_s: float = 0.0) -> float:
        """Seconds without a word after which nothing is left of a job's ranks on a node: clocks drift, and killing
        takes a moment. ``patience_s``: see JobRecord.
        """
        if not self.fence_s:
            return self.lease_s
        fence_s = self.fence_s + patience_s
        return max(self.lease_s, fence_s + max(1.0, 0.05 * fence_s))

    def gone_at(self, heard: float, patience_s: float = 0.0) -> float:
        """Returns when nothing is left of a job's ranks on a node that was heard of last at ``heard``."""
        newcomer = self.arrived_clock + self.outage_s if self.fence_s else -math.inf
        return max(heard, newcomer) + self.gone_s(patience_s)
