"""Plans: what happens to a bucket once every local rank has filled it.

A plan is a list of steps over the named state slots of a bucket. Slots are equally long runs of elements of the
bucket's dtype. ``GRADIENT`` holds this rank's contribution and is never written by a plan, so that a step can be run
again from it; ``RESULT`` is what the rank sees in ``.grad`` afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass

from bagua.algorithms.codec import Codec

GRADIENT = "gradient"
RESULT = "result"

# A rank without a gradient contributes zeros, so that only these make sense.
REDUCTIONS = ("SUM", "AVG")


@dataclass(frozen=True)
class AllReduce:
    """``dst`` = reduction over all ranks of ``src``, the same bits on every rank.

    Moves, per rank and step, one pass over the bucket inside a host, and 2(h-1)/h of the bucket's bytes in and out of
    each of h hosts. ``op`` is a name of ``bagua.torch_api.ReduceOp``; AVG divides by the number of ranks.
    ``codec``: how float32 crosses between hosts (``codec.py``). Without one, and for other dtypes, it crosses as it is.
    """

    op: str = "AVG"
    src: str = GRADIENT
    dst: str = RESULT
    codec: Codec | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", Codec.of(self.codec))
        if self.op not in REDUCTIONS:
            raise ValueError(f"AllReduce can't apply {self.op!r}: choose one of {', '.join(REDUCTIONS)}.")


Step = AllReduce


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they run. Raises ValueError when they don't fit together."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("A plan needs at least one step.")
        filled = {GRADIENT}
        for number, step in enumerate(self.steps):
            if not isinstance(step, Step):
                raise ValueError(f"Step {number} of a plan is {step!r}, which is not a known step (AllReduce).")
            if step.src not in filled:
                raise ValueError(f"Step {number} of a plan reads slot {step.src!r}, which no earlier step has filled.")
            if step.dst == GRADIENT:
                raise ValueError(f"Step {number} of a plan writes {GRADIENT!r}: contributions stay as they are.")
            filled.add(step.dst)
        if RESULT not in filled:
            raise ValueError(f"A plan must fill slot {RESULT!r}; this one fills {sorted(filled - {GRADIENT})}.")
