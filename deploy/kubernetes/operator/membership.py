"""The choice of pods to make, drain and delete, so that a job has those that it should; all of the minimum come, or
none. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagua.operator import pods, status
from bagua.operator.facts import Action, Create, Delete, Drain, Pod, Seen, Task
from bagua.operator.job import GangScheduler, Spec

REPLACED = "its pod is replaced"
SURPLUS = "fewer pods are wanted"


def adjust(seen: Seen, spec: Spec, task: Task | None, attempt: int) -> tuple[list[Action], str]:
    """Actions, and what changes, in words (empty: nothing). ``task`` is None before the submission."""
    ended = [pod for pod in seen.pods if pod.ended and not pod.leaving]
    # Their output can be read until they are replaced.
    actions: list[Action] = [Delete("Pod", pod.name, "it has ended") for pod in ended if not seen.waits]
    alive = [pod for pod in seen.pods if not pod.ended and not pod.leaving]
    stale = _stale(seen, spec, alive, task)
    going = [pod for pod in alive if pod.notice or pod in stale]
    staying = [pod for pod in alive if pod not in going]
    words = _words(going)
    used = {pod.index for pod in seen.pods}  # a name is free when its pod is gone, not before
    # A static job keeps the ranks that it began with: a new pod would get none.
    static_runs = task is not None and spec.elastic is None
    for number in range(0 if static_runs else spec.wanted - len(staying)):
        index = next(free for free in range(len(used) + 1) if free not in used)
        used.add(index)
        # Only the minimum: a scheduler would hold all of them back for more pods than have a place.
        grouped = task is None and len(alive) + number < spec.minimum
        actions.append(Create(pods.pod(seen, spec, index, attempt, grouped)))
    if task is not None and spec.elastic is not None:
        actions += _leave(seen, going, staying, task)
        actions += _surplus(spec, staying, task)
    elif task is None:
        extra = len(staying) - spec.wanted
        actions += [Delete("Pod", pod.name, pod.notice or REPLACED) for pod in going]
        actions += [Delete("Pod", pod.name, SURPLUS) for pod in _last(staying, extra)]
    return actions, words


def _stale(seen: Seen, spec: Spec, alive: Sequence[Pod], task: Task | None) -> list[Pod]:
    """Pods of an older specification that are replaced now: one after the other, while the job is whole. Before the
    submission, all of them."""
    wanted = pods.wanted_hash(seen, spec)
    old = [pod for pod in alive if pod.hash != wanted]
    if task is None or not old:
        return old
    if spec.elastic is None or task.state not in ("running", "waiting"):
        return []
    # A pod that never ran, for a wrong image say, can be replaced at no cost to the job.
    free = [pod for pod in old if pod.name not in task.nodes or _drains(seen, pod)]
    if free or task.state == "waiting":
        return free
    whole = len(alive) >= spec.wanted and all(pod.name in task.members for pod in alive)
    return old[:1] if whole or len(alive) > spec.wanted else []


def _drains(seen: Seen, pod: Pod) -> bool:
    return pod.name in seen.nodes and seen.nodes[pod.name].draining


def _can_follow(seen: Seen, going: Pod, staying: Sequence[Pod], task: Task) -> bool:
    """True if a pod is there that can take the place of one that goes."""
    spare = [seen.nodes[pod.name] for pod in staying if pod.name in seen.nodes and pod.name not in task.nodes]
    version = seen.nodes[going.name].wire_version
    return any(one.connected and not one.draining and one.wire_version == version for one in spare)


def _leave(seen: Seen, going: Sequence[Pod], staying: Sequence[Pod], task: Task) -> list[Action]:
    """Drains nodes, and deletes their pods when they hold nothing of the job any more."""
    actions: list[Action] = []
    connected = any(pod.name in seen.nodes and seen.nodes[pod.name].connected for pod in staying)
    stay = {name for name in task.members if name in seen.nodes and not seen.nodes[name].draining}
    for pod in going:
        node = seen.nodes.get(pod.name)
        if stay == {pod.name}:
            continue  # it holds the state of the job: another one must have joined first
        if pod.name not in task.nodes:
            if node is None or node.draining or pod.notice:
                actions.append(Delete("Pod", pod.name, pod.notice or REPLACED))
            elif connected:
                actions.append(Drain(pod.name, pod.notice or REPLACED))
        elif node is None or not node.connected or node.draining or not connected:
            continue
        elif pod.notice or _can_follow(seen, pod, staying, task):
            stay.discard(pod.name)  # so drains of one round leave a member
            actions.append(Drain(pod.name, pod.notice or REPLACED))
    return actions


def _surplus(spec: Spec, staying: Sequence[Pod], task: Task) -> list[Action]:
    """Pods beyond the wanted number that the job has left, or never took."""
    extra = len(staying) - spec.wanted
    if extra <= 0 or task.wanted > spec.wanted:  # the coordinator counts on all of them until it has the lower number
        return []
    free = [pod for pod in staying if pod.name not in task.nodes]
    return [Delete("Pod", pod.name, SURPLUS) for pod in _last(free, extra)] if len(task.members) <= spec.wanted else []


def _last(found: Sequence[Pod], number: int) -> list[Pod]:
    """The ``number`` youngest ones by index."""
    return sorted(found, key=lambda pod: pod.index)[-number:] if number > 0 else []


def _words(going: Sequence[Pod]) -> str:
    parts = [f"{pod.name}: {pod.notice or 'replaced by a pod of the new specification'}" for pod in going]
    return "; ".join(parts)


@dataclass(frozen=True)
class Gang:
    """``ready``: the job may be submitted. ``give_back``: pods that are placed should go, as others are not. ``words``:
    what is waited for."""

    ready: bool
    give_back: bool
    words: str


def complete(seen: Seen, spec: Spec, since: str | None, now: float, late_s: float) -> Gang:
    """Looks whether the pods are complete. ``since``: when pods began to be waited for. Beyond the minimum, pods
    without a place are waited for ``late_s`` seconds, and those that have one, whose image may still be on its way,
    until the gang's limit.
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
