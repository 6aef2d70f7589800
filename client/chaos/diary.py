"""The diaries that ranks write while faults are played, and the promises that must hold of them.

A rank has a file of its own, ``diary-PID``. It has lines ``step NS WORLD`` after each committed step, with the
monotonic time in nanoseconds, ``epoch NUMBER HASH LOST DOUBLED WHOLE NS`` after each epoch, and ``end`` at the end.
WHOLE is the number of ranks while nobody was lost and nobody has joined, then 0.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Epoch:
    """Entry at the end of an epoch: a hash of the state, samples used too rarely and too often so far, the number of
    ranks (0 once somebody was lost or has joined), and when that was, in seconds.
    """

    digest: str
    lost: int
    doubled: int
    whole: int
    at: float


@dataclass
class Diary:
    """Diary of one rank. ``steps``: when each was committed, in seconds. ``epochs``: by number. ``world``: ranks in the
    last step.
    """

    steps: list[float] = field(default_factory=list)
    epochs: dict[int, Epoch] = field(default_factory=dict)
    world: int = 0
    ended: bool = False

    def goes_on_after(self, epoch: Epoch) -> bool:
        """Returns True if the rank has made a step after this epoch, or ended well."""
        return self.ended or (bool(self.steps) and self.steps[-1] > epoch.at)


class Diaries:
    """Diaries of all ranks of a job that write into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes
        self._found: dict[int, Diary] = {}

    def read(self) -> dict[int, Diary]:
        """Reads the diaries by pid, as they are now. Only what is new is read; a line without its end does not count
        yet.
        """
        for path in self._folder.glob("diary-*"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                lines, _, _ = file.read().rpartition(b"\n")
            diary = self._found.setdefault(int(path.name.removeprefix("diary-")), Diary())
            if lines:
                self._read[path] = self._read.get(path, 0) + len(lines) + 1
                for line in lines.decode().split("\n"):
                    _note(diary, line)
        return self._found


def _note(diary: Diary, line: str) -> None:
    match line.split():
        case ["step", at, world]:
            diary.steps.append(int(at) / 1e9)
            diary.world = int(world)
        case ["epoch", number, digest, lost, doubled, whole, at]:
            diary.epochs[int(number)] = Epoch(digest, int(lost), int(doubled), int(whole), int(at) / 1e9)
        case ["end"]:
            diary.ended = True


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


@dataclass(frozen=True)
class Breach:
    """A promise that was not kept: "lost" or "doubled" samples, "different" replicas, or "stuck". ``count``: of these,
    since the last breach of it. ``at``: when it came to light, in seconds."""

    promise: str
    count: int
    at: float
    words: str


def violations(diaries: Mapping[int, Diary]) -> list[Breach]:
    """Broken promises, in the order of epochs."""
    found: list[Breach] = []
    before = {"lost": 0, "doubled": 0}
    for number in sorted({number for diary in diaries.values() for number in diary.epochs}):
        told = {pid: diary.epochs[number] for pid, diary in diaries.items() if number in diary.epochs}
        at = max(epoch.at for epoch in told.values())
        # A rank that is put out may have seen the end of a step that the others repeat without it: it makes no other.
        went_on = {pid: epoch for pid, epoch in told.items() if diaries[pid].goes_on_after(epoch)} or told
        counts = Counter(epoch.digest for epoch in went_on.values())
        if len(counts) > 1:
            hashes = ", ".join(f"{pid}: {epoch.digest}" for pid, epoch in told.items())
            others = len(went_on) - max(counts.values())
            found.append(Breach("different", others, at, f"after epoch {number} replicas differ ({hashes})"))
        for promise in before:
            count = max(getattr(epoch, promise) for epoch in told.values())
            if count > before[promise]:
                words = f"after epoch {number} {count} samples are {promise}"
                found.append(Breach(promise, count - before[promise], at, words))
            before[promise] = max(count, before[promise])
    return found


def whole_epochs(diaries: Mapping[int, Diary]) -> dict[tuple[int, int], str]:
    """Hashes by (ranks, epoch) of the epochs in which, and before which, nobody was lost or has joined. They are the
    same in every run of the program, whatever else happens."""
    return {
        (epoch.whole, number): epoch.digest
        for diary in diaries.values()
        for number, epoch in diary.epochs.items()
        if epoch.whole
    }
