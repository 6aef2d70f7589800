"""Finds the daemon below its keeper: the process that a node's user starts is the keeper."""

from __future__ import annotations

import os
from pathlib import Path

_MARK = b"--keeper-fd"


def daemon_pid(keeper: int) -> int:
    """The daemon that runs below this keeper now. Raises ProcessLookupError if there is none at this moment."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = (Path("/proc") / name / "stat").read_text(errors="replace")
            command = (Path("/proc") / name / "cmdline").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # The name in parentheses may hold blanks and parentheses.
        if int(stat[stat.rindex(")") + 2 :].split()[1]) == keeper and _MARK in command:
            return int(name)
    raise ProcessLookupError(f"no daemon runs below process {keeper}")
