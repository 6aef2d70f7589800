"""Analyses plans of gradients: which steps carry the tail, and whether a plan may run twice."""

from __future__ import annotations

from bagua.algorithms import AllReduce, Broadcast, Local, Plan
from bagua.algorithms.plan import EVERYONE, FRESH, GRADIENT, HOST, LEADERS, RESULT

_BY_LEVELS = (HOST, LEADERS, HOST)


def tail_path(plan: Plan) -> tuple[int, ...]:
    """Numbers of the steps that carry the tail along: the first AllReduce, and those after it that pass on its
    result."""
    holder: str | None = None
    path = []
    for number, step in enumerate(plan.steps):
        if isinstance(step, AllReduce) and holder in (None, step.src):
            holder = step.dst
            path.append(number)
        elif isinstance(step, Broadcast) and holder == step.slot:
            path.append(number)
    return tuple(path)


def tail_reaches_all(plan: Plan) -> bool:
    """Returns True if every rank's tail holds, at the end, the reduction of all ranks' tails."""
    places = [plan.steps[number].over for number in tail_path(plan)]  # type: ignore[union-attr]
    left = iter(places)
    # ``in`` uses the iterator up: it finds the levels in this order alone.
    return EVERYONE in places or all(place in left for place in _BY_LEVELS)


def may_run_twice(plan: Plan) -> bool:
    """Returns True if a second run on the same gradients gives the result of the first one.

    Not if a ``Local`` step writes anything but results: gradients and state have then changed. Nor if a step
    writes a slot that the plan has read before: its content comes from the training step before. Nor if a codec keeps
    what it has lost, which would be given twice.
    """
    made = {GRADIENT}
    kept = set()  # read from the step before
    for step in plan.steps:
        codec = getattr(step, "codec", None)
        if codec is not None and codec.error_feedback:
            return False
        if isinstance(step, Local) and set(step.writes) - {RESULT}:
            return False
        kept |= set(step.reads) - made  # comes from the training step before
        made |= set(step.writes)
    return not any(kept & set(step.writes) for step in plan.steps)


def in_place(plan: Plan) -> bool:
    """Returns True if results may lie where contributions do: none is read when the first result is written, but by the
    all-reduce that writes it; and no result of the step before is read."""
    written = False
    for step in plan.steps:
        writes, contributions = RESULT in step.writes, {GRADIENT, FRESH} & {*step.reads, *step.writes}
        if contributions and (written or (writes and not isinstance(step, AllReduce))):
            return False
        if RESULT in step.reads and not written:  # contributions of this step lie over the result of the last one
            return False
        written = written or writes
    return True


def changed_in_place(plan: Plan) -> tuple[str, ...]:
    """Slots that the plan reads as they were before it, and writes, up to its last step that communicates."""
    communicating = [number for number, step in enumerate(plan.steps) if not isinstance(step, Local)]
    made: set[str] = set()
    kept: set[str] = set()
    for step in plan.steps[: max(communicating, default=-1) + 1]:  # all that follows is held back until the unit counts
        kept |= set(step.reads) - made
        made |= set(step.writes)
    return tuple(sorted(kept & made))


def adds_up(plan: Plan) -> bool:
    """Returns True if results grow with the number of ranks, as a sum does and a mean does not."""
    # A Local step may divide the sum.
    by_user = any(isinstance(step, Local) and RESULT in step.writes for step in plan.steps)
    return not by_user and any(getattr(plan.steps[number], "op", "") == "SUM" for number in tail_path(plan))
