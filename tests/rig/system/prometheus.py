"""Debian's promtool, and names of metrics in texts."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from rig.programs import program


def promtool(*arguments: str | Path, text: str = "", cwd: Path | None = None) -> str:
    """Runs it to its end; returns what it printed. Fails the test if it refuses."""
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_metrics(text: str) -> None:
    """A scrape as promtool wants it; unchecked where there is no promtool."""
    if shutil.which("promtool"):
        assert promtool("check", "metrics", text=text).strip() == ""


def families_in(text: str) -> set[str]:
    """Names of our metrics that a scrape declares."""
    return set(re.findall(r"^# TYPE (bagua_\w+)", text, re.MULTILINE))
