"""All of the minimum, or none: whether the pods of a job are complete. Pure."""

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
    """``since``: when pods began to be waited for. Beyond the minimum pods are waited for ``late_s`` seconds."""
    waited = now - status.seconds_of(since) if since else 0.0
    alive = [pod for pod in seen.pods if not pod.ended and not pod.leaving]
    placed = sum(pod.scheduled for pod in alive)
    connected = sum(pod.name in seen.nodes and seen.nodes[pod.name].connected for pod in alive)
    if connected >= spec.wanted or (connected >= spec.minimum and waited >= late_s):
        return Gang(True, False, "")
    if placed < spec.minimum:
        words = f"{placed} of {spec.minimum} pods are placed."
        own = pods.gang_scheduler(seen, spec) is GangScheduler.OPERATOR
        late = waited >= spec.run_policy.scheduling_policy.gang_timeout_seconds
        return Gang(False, own and late and bool(alive), words)
    return Gang(False, False, f"{connected} of {spec.wanted} node daemons have come.")
