"""The cost of faults, by kind. ``python -m bagua.chaos.report [--short] FILE...`` adds up several runs of ``bagua chaos
--output json``, as a table in Markdown."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bagua.chaos.plan import JOIN, KINDS

WORDS = {name: kind.words for name, kind in KINDS.items()} | {JOIN: "those that were lost, or had left, are replaced"}
HEADINGS = (
    *("kind", "fault", "times", "samples lost", "samples doubled", "replicas different", "stuck"),
    *("median pause, ms", "longest"),
)
SHORT_HEADINGS = ("faults", "times", "samples lost or doubled", "replicas different", "median pause, ms", "longest")
PROMISES = ("lost", "doubled", "different", "stuck")


@dataclass
class Played:
    """Fault, or join, that was played. ``pause_s``: the longest time between two steps of the ranks that are left, less
    a usual step and the time for which the fault itself held them; None if they made none. ``broken``: how often it
    broke each promise.
    """

    kind: str
    target: str
    at_s: float
    pause_s: float | None = None
    ranks_left: int = 0
    broken: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """Row about all faults of a kind. ``broken``: how often they broke each promise."""

    kind: str
    times: int
    broken: dict[str, int]
    median_pause_s: float | None
    longest_pause_s: float | None

    def cells(self) -> list[str]:
        """Returns the cells below HEADINGS."""
        pauses = ["" if one is None else f"{one * 1e3:.0f}" for one in (self.median_pause_s, self.longest_pause_s)]
        counts = (self.times, *(self.broken[promise] for promise in PROMISES))
        return [self.kind, WORDS.get(self.kind, ""), *map(str, counts), *pauses]


def by_kind(played: Sequence[Played]) -> list[Row]:
    """A row for each kind that was played, in the order of ``bagua chaos --list``."""
    rows = []
    for kind in WORDS:
        these = [one for one in played if one.kind == kind]
        if these:
            pauses = [one.pause_s for one in these if one.pause_s is not None]
            broken = {promise: sum(one.broken.get(promise, 0) for one in these) for promise in PROMISES}
            middle, longest = (statistics.median(pauses), max(pauses)) if pauses else (None, None)
            rows.append(Row(kind, len(these), broken, middle, longest))
    return rows


def by_group(played: Sequence[Played]) -> list[list[str]]:
    """Makes a short table with a row for each group of kinds; SHORT_HEADINGS names its columns. Joins are no faults."""
    rows = []
    for group in dict.fromkeys(kind.group for kind in KINDS.values()):
        kinds = [name for name, kind in KINDS.items() if kind.group == group]
        these = [one for one in played if one.kind in kinds]
        if these:
            lost, doubled, different, _ = (sum(one.broken.get(name, 0) for one in these) for name in PROMISES)
            pauses = [one.pause_s * 1e3 for one in these if one.pause_s is not None]
            middle, longest = (f"{statistics.median(pauses):.0f}", f"{max(pauses):.0f}") if pauses else ("", "")
            counts = map(str, (len(these), lost + doubled, different))
            rows.append([f"{group}: {', '.join(kinds)}", *counts, middle, longest])
    return rows


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Prints the sum of the runs that are named."""
    names = [name for name in sys.argv[1:] if name != "--short"]
    documents = [json.loads(Path(name).read_text()) for name in names]
    played = [Played(**one) for document in documents for one in document["played"]]
    short = len(names) < len(sys.argv) - 1
    rows = by_group(played) if short else [row.cells() for row in by_kind(played)]
    print(markdown(SHORT_HEADINGS if short else HEADINGS, rows))
    faults = sum(one.kind != JOIN for one in played)
    steps, jobs = (sum(document[name] for document in documents) for name in ("steps", "jobs"))
    print(f"\n{faults} faults of {len({one.kind for one in played} - {JOIN})} kinds, {jobs} jobs, {steps} steps.")


if __name__ == "__main__":
    main()
