"""Plans: values that say which steps a bucket goes through. Algorithms make them, and the wrapped model runs them.

A plan is a list of steps over the named state slots of a bucket. A slot is a flat run of elements. Some have a meaning
of their own; an algorithm adds others with ``Bucket.add_slot``.

* ``GRADIENT``: this rank's contribution, in buckets of gradients. No step but ``Local`` writes it, so that a step can
  be run again from it.
* ``FRESH``: the same before it is copied: one tensor per parameter, where autograd left it (``Bucket.views``).
  ``Local`` steps read it, before the first step that communicates. A plan that reads FRESH and not GRADIENT saves that
  copy.
* ``RESULT``: what the rank sees in ``.grad`` afterwards, in buckets of gradients. A plan that does not fill it leaves
  ``.grad`` as it is.
* ``WEIGHT``: the parameters themselves, in buckets of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bagua.algorithms.checks import check_everywhere
from bagua.algorithms.codec import Codec

GRADIENT = "gradient"
FRESH = "fresh"
RESULT = "result"
WEIGHT = "weight"

KEEP = "keep"
ZERO = "zero"
COPY = "copy"
RESCALE = "rescale"
SCRATCH = "scratch"
# Rule for a slot when the members of an elastic job change. KEEP: each rank keeps its own. ZERO: it begins anew. COPY:
# it is the same on all ranks; those that are left keep it. RESCALE: it is a sum over ranks, and is multiplied by the
# new number of them over the old one. Ranks that join get COPY and RESCALE from the others, and begin the rest as
# ``init_operations`` does. SCRATCH: each step fills it anew, so that a checkpoint, which holds all others, leaves it
# out.
ON_CHANGE = (KEEP, ZERO, COPY, RESCALE, SCRATCH)

EVERYONE = "everyone"
HOST = "host"
LEADERS = "leaders"
PLACES = (EVERYONE, HOST, LEADERS)

# A rank without a gradient contributes zeros, so that only these make sense.
REDUCTIONS = ("SUM", "AVG")

# Among whom: all ranks of the model's process group, the ranks of this host, one rank of each host, or a function that
# is called each time and returns a communicator (a pair of this step), None where this rank has no part in it.
Over = str | Callable[[], Any]


def _check_over(over: Over) -> None:
    if not callable(over) and over not in PLACES:
        raise ValueError(
            f"A step can't go over {over!r}: choose one of {', '.join(PLACES)}, or pass a function. [BG307]"
        )


@dataclass(frozen=True)
class AllReduce:
    """``dst`` = reduction over the ranks of ``over`` of ``src``, the same bits on each of them. May be the same slot.

    Moves, per rank and step, one pass over the bucket inside a host, and 2(h-1)/h of the bucket's bytes in and out of
    each of h hosts. ``op`` is a name of ``bagua.torch_api.ReduceOp``; AVG divides by the number of ranks.
    ``codec``: how float32 crosses between hosts (``codec.py``). Without one, and for other dtypes, it crosses as it is.
    ``everywhere``: ranks of one host exchange encoded values, too: each rank's contribution and the result pass through
    the codec, as in the original's algorithms that are not hierarchical.
    """

    op: str = "AVG"
    src: str = GRADIENT
    dst: str = RESULT
    codec: Codec | None = None
    everywhere: bool = False
    over: Over = EVERYONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", Codec.of(self.codec))  # the dataclass is frozen
        _check_over(self.over)
        if self.op not in REDUCTIONS:
            raise ValueError(f"AllReduce can't apply {self.op!r}: choose one of {', '.join(REDUCTIONS)}. [BG307]")
        check_everywhere(self.everywhere, self.codec)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.src,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.dst,)


@dataclass(frozen=True)
class Broadcast:
    """``slot`` of the rank at position ``root`` of ``over`` replaces everybody's."""

    slot: str
    root: int = 0
    over: Over = HOST

    def __post_init__(self) -> None:
        _check_over(self.over)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.slot,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.slot,)


@dataclass(frozen=True)
class Neighbours:
    """Sends ``src``, encoded once, to both neighbours in the ring of ``over``; positions r-1 and r+1 modulo n.

    Afterwards ``own``, ``left`` and ``right`` hold what this rank's, the left and the right neighbour's message decode
    to: the same bits on all who decode one message. Two messages leave and two arrive per rank; one each with two
    ranks, where both neighbours are the same; none with one rank (``left`` and ``right`` are then zeros). Without a
    codec the elements travel as they are.
    """

    src: str
    own: str
    left: str
    right: str
    codec: Codec | None = None
    over: Over = EVERYONE

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", Codec.of(self.codec))  # the dataclass is frozen
        _check_over(self.over)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.src,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.own, self.left, self.right)


@dataclass(frozen=True)
class Local:
    """Computation of this rank alone, on slots of the bucket: ``run(bucket)``.

    At the beginning of a plan of gradients it runs inside backward, when the bucket is full, and otherwise where the
    plan is joined, always in the user's thread. What it raises reaches the user. ``reads`` and ``writes`` name slots.

    In an elastic job a step before the last one that communicates may run again: slots that it changes are put back as
    they were, and so are the tensors that ``beside()`` returns, the same ones each time.
    """

    run: Callable[[Any], None]
    name: str = "local"
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = field(default=())
    beside: Callable[[], Sequence[Any]] | None = None


Step = AllReduce | Broadcast | Neighbours | Local


@dataclass(frozen=True)
class Plan:
    """Steps in the order in which they run. Raises ValueError when they don't fit together."""

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("A plan needs at least one step. [BG307]")
        for number, step in enumerate(self.steps):
            if not isinstance(step, Step):
                known = "AllReduce, Broadcast, Neighbours, Local"
                raise ValueError(f"Step {number} of a plan is {step!r}, which is not a known step ({known}). [BG307]")
            if GRADIENT in step.writes and not isinstance(step, Local):  # a step is repeated from it
                raise ValueError(
                    f"Step {number} of a plan writes {GRADIENT!r}: contributions stay as they are. [BG307]"
                )
            early = all(isinstance(one, Local) for one in self.steps[: number + 1])
            if FRESH in step.writes or (FRESH in step.reads and not early):
                raise ValueError(
                    f"Step {number} of a plan can't use {FRESH!r}: Local steps read it, before the first other step. "
                    "[BG307]"
                )

    @property
    def slots(self) -> frozenset[str]:
        """Every slot that a step reads or writes."""
        return frozenset(slot for step in self.steps for slot in (*step.reads, *step.writes))
