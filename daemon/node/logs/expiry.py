"""The ended jobs of a node whose logs are past keeping. Reads sizes and times of files; deletes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from bagua.base.retention import Keep


def past_keeping(folder: Path, ended: Sequence[str], keep: Keep, now: float) -> list[str]:
    """Returns those of ``ended`` to forget, the oldest first. ``ended``: jobs, the oldest first, each with a folder of
    its name below ``folder``. The newest stays whatever its size. ``now``: seconds since the epoch.
    """
    gone = list(ended[: max(0, len(ended) - keep.jobs)])
    if math.isinf(keep.age_s) and math.isinf(keep.size):
        return gone
    room, full = keep.size, False
    kept: list[str] = []
    for job_id in reversed(ended[len(gone) :]):
        size, newest = _measure(folder / job_id)
        room -= size
        full = full or (room < 0 and bool(kept))
        if not full and now - newest <= keep.age_s:
            kept.append(job_id)
    return [job_id for job_id in ended if job_id not in set(kept)]


def _measure(folder: Path) -> tuple[int, float]:
    """Returns (bytes, when something was written last); of a folder that is not there: (0, infinity)."""
    size, newest = 0, -math.inf
    for path in (folder, *folder.rglob("*")):
        try:
            found = path.lstat()
        except OSError:
            continue
        size += found.st_size
        newest = max(newest, found.st_mtime)
    return size, newest if size else math.inf
