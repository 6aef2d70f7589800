"""The diaries that ranks write while faults are played, and the promises that must hold of them.

A rank has a file of its own, ``diary-PID``. It has lines ``step NS WORLD`` after each committed step, with the
monotonic time in nanoseconds, ``epoch NUMBER HASH LOST DOUBLED WHOLE`` after each epoch, and ``end`` at
the end. WHOLE is 1 while nobody was lost.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Epoch:
    """At its end: a hash of the state, samples used too rarely and too often so far, whether nobody was lost yet."""

    digest: str
    lost: int
    doubled: int
    whole: bool


@dataclass
class Diary:
    """Of one rank. ``steps``: when each was committed, in seconds. ``epochs``: by number. ``world``: ranks in the last
    step."""

    steps: list[float] = field(default_factory=list)
    epochs: dict[int, Epoch] = field(default_factory=dict)
    world: int = 0
    ended: bool = False


def read(path: Path) -> Diary:
    """The file of a rank that may be writing: a line without its end does not count."""
    found = Diary()
    for line in path.read_text().splitlines(keepends=True):
        match line.split() if line.endswith("\n") else []:
            case ["step", at, world]:
                found.steps.append(int(at) / 1e9)
                found.world = int(world)
            case ["epoch", number, digest, lost, doubled, whole]:
                found.epochs[int(number)] = Epoch(digest, int(lost), int(doubled), whole == "1")
            case ["end"]:
                found.ended = True
    return found


def read_all(folder: Path) -> dict[int, Diary]:
    """All diaries by pid."""
    return {int(path.name.removeprefix("diary-")): read(path) for path in folder.glob("diary-*")}


def usual_step(diaries: Iterable[Diary], before: float) -> float:
    """Seconds of a step at the median, before a moment; 0 if there were not two."""
    gaps = [
        later - earlier
        for diary in diaries
        for earlier, later in itertools.pairwise(at for at in diary.steps[-200:] if at <= before)
    ]
    return statistics.median(gaps) if gaps else 0.0


def longest_pause(diaries: Iterable[Diary], since: float, until: float) -> float:
    """The longest time between two steps of a rank that overlaps the moments ``since`` and ``until``."""
    return max(
        (
            later - earlier
            for diary in diaries
            for earlier, later in itertools.pairwise(diary.steps)
            if later > since and earlier < until
        ),
        default=0.0,
    )


def violations(diaries: Mapping[int, Diary]) -> dict[str, list[str]]:
    """Broken promises in words: "lost" and "doubled" samples, "different" replicas."""
    found: dict[str, list[str]] = {"lost": [], "doubled": [], "different": []}
    for number in sorted({number for diary in diaries.values() for number in diary.epochs}):
        told = {pid: diary.epochs[number] for pid, diary in diaries.items() if number in diary.epochs}
        if len({epoch.digest for epoch in told.values()}) > 1:
            hashes = ", ".join(f"{pid}: {epoch.digest}" for pid, epoch in told.items())
            found["different"].append(f"after epoch {number} replicas differ ({hashes})")
        if lost := max(epoch.lost for epoch in told.values()):
            found["lost"].append(f"after epoch {number} {lost} samples are lost")
        if doubled := max(epoch.doubled for epoch in told.values()):
            found["doubled"].append(f"after epoch {number} {doubled} samples are doubled")
    return found


def whole_epochs(diaries: Mapping[int, Diary]) -> dict[int, str]:
    """Hashes of the epochs in which, and before which, nobody was lost. They are the same in every run of the program
    on so many ranks, whatever else happens."""
    return {number: epoch.digest for diary in diaries.values() for number, epoch in diary.epochs.items() if epoch.whole}
