"""Compares two settings on interleaved steps. Pure: figures in, a verdict with its reason out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median

SMALLEST_GAIN = 0.01  # Share of the step time; less is not worth a change
CLEARLY_WORSE = 0.05
LEAST_PAIRS, MOST_PAIRS = 2, 4
# Measured steps of one block. The one before them is not counted: buckets have just been cut.
STEPS_OF_BLOCK = 3
_OF_NORMAL = 1.4826  # a normal distribution's deviation, in median absolute deviations
_OF_MEDIAN = 1.2533  # the standard error of its median, in that of its mean


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and of those the seconds for which the rank waited for communication."""

    seconds: float
    exposed: float


@dataclass(frozen=True)
class Figures:
    """Median and spread (deviation, by the median absolute deviation) of steps, in seconds."""

    seconds: float
    spread: float
    exposed: float
    exposed_spread: float
    steps: int

    @classmethod
    def of(cls, steps: Sequence[Step]) -> Figures:
        """Makes figures of at least one step."""
        seconds, exposed = [one.seconds for one in steps], [one.exposed for one in steps]
        return cls(median(seconds), _spread(seconds), median(exposed), _spread(exposed), len(steps))

    def error(self, spread: float) -> float:
        """Standard error of a median with this spread."""
        return float(_OF_MEDIAN * spread / self.steps**0.5)


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return _OF_NORMAL * median(abs(value - middle) for value in values)


class Verdict(Enum):
    """``UNDECIDED``: more steps are needed."""

    UNDECIDED = "undecided"
    BETTER = "better"
    NOT_BETTER = "not better"
    WORSE = "clearly worse"


@dataclass
class Comparison:
    """Blocks of the present setting and of the candidate, in turns: A B A B. ``pairs``: at most so many of both."""

    pairs: int = MOST_PAIRS
    blocks: list[list[Step]] = field(default_factory=list)

    @property
    def of_candidate(self) -> bool:
        """True if the next block is one of the candidate."""
        return len(self.blocks) % 2 == 1

    def add(self, block: Sequence[Step]) -> None:
        """Measured steps of the next block."""
        self.blocks.append(list(block))

    def figures(self) -> tuple[Figures, Figures]:
        """Returns figures of the present setting, and of the candidate. Both have been measured."""
        present = [step for block in self.blocks[::2] for step in block]
        candidate = [step for block in self.blocks[1::2] for step in block]
        return Figures.of(present), Figures.of(candidate)

    @property
    def ratio(self) -> float:
        """Step time of the candidate, in that of the present setting: the median over neighbouring blocks, so that a
        drift of both does not count."""
        pairs = zip(self.blocks[::2], self.blocks[1::2], strict=False)
        return median(_middle(candidate) / max(_middle(present), 1e-9) for present, candidate in pairs)

    def verdict(self) -> tuple[Verdict, str]:
        """Returns the verdict, with the reason in words."""
        whole = len(self.blocks) // 2
        if len(self.blocks) % 2 or not whole:
            return Verdict.UNDECIDED, "it is being measured"
        present, candidate = self.figures()
        base = max(present.seconds, 1e-9)
        # Twice the standard error: 95 of 100 differences by chance are smaller.
        noise = 2 * (present.error(present.spread) ** 2 + candidate.error(candidate.spread) ** 2) ** 0.5 / base
        quiet = 2 * (present.error(present.exposed_spread) ** 2 + candidate.error(candidate.exposed_spread) ** 2) ** 0.5
        change, exposed = self.ratio - 1, (candidate.exposed - present.exposed) / base
        words = f"{change:+.1%} step time, {exposed:+.1%} exposed communication, noise {noise:.1%}"
        if change > CLEARLY_WORSE + noise:  # after one pair, too: a bad candidate costs time in each of its steps
            return Verdict.WORSE, words
        if whole < min(LEAST_PAIRS, self.pairs):
            return Verdict.UNDECIDED, words
        faster = change < -max(SMALLEST_GAIN, noise) and exposed < max(SMALLEST_GAIN, quiet / base)
        waits_less = exposed < -max(SMALLEST_GAIN, quiet / base) and change < -SMALLEST_GAIN / 2
        if (faster or waits_less) and self._every_pair_agrees():
            return Verdict.BETTER, words
        if whole >= self.pairs or change > -SMALLEST_GAIN:  # more pairs would hardly make a gain of it
            return Verdict.NOT_BETTER, words
        return Verdict.UNDECIDED, words

    def _every_pair_agrees(self) -> bool:
        """True if at least three of four pairs agree."""
        pairs = list(zip(self.blocks[::2], self.blocks[1::2], strict=False))
        return sum(_middle(candidate) >= _middle(present) for present, candidate in pairs) <= len(pairs) // 4


def _middle(block: Sequence[Step]) -> float:
    return median(step.seconds for step in block)
