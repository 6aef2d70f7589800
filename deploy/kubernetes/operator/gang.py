"""The rule that pods of a job come all of the minimum, or none. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from bagua.operator import pods, status
from bagua.operator.facts import Seen
from bagua.operator.job import GangScheduler, Spec


@dataclass(frozen=True)
class Gang:
    """``ready``: the job may be submitted. ``give_back``: pods that are placed should go, as others are not. ``words``:
    what is waited for."""

    ready: bool
    give_back: bool
    words: str


def complete(seen: Seen, spec: Spec, since: str | None, now: float, late_s: float) -> Gang:
    """Looks whether the pods are complete. ``since``: when pods began to be waited for. Beyond the minimum, pods that
    find no place are waited for ``late_s`` seconds, and those that are placed (their image is pulled) until the gang's
    limit.
    """
    waited = now - status.seconds_of(since) if since else 0.0
    alive = [pod for pod in seen.pods if not pod.ended and not pod.leaving]
    placed = sum(pod.scheduled for pod in alive)
    there = {pod.name for pod in alive if pod.name in seen.nodes and seen.nodes[pod.name].connected}
    connected, limit = len(there), spec.run_policy.scheduling_policy.gang_timeout_seconds
    coming = any(pod.scheduled and pod.name not in there for pod in alive) and waited < limit
    if connected >= spec.wanted or (connected >= spec.minimum and waited >= late_s and not coming):
        return Gang(True, False, "")
    if placed < spec.minimum:
        words = f"{placed} of {spec.minimum} pods are placed."
        own = pods.gang_scheduler(seen, spec) is GangScheduler.OPERATOR
        return Gang(False, own and waited >= limit and bool(alive), words)
    return Gang(False, False, f"{connected} of {spec.wanted} node daemons have come.")
