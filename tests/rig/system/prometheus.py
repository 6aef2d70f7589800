"""Debian's promtool, and names of metrics in texts."""

import re
import shutil
import subprocess

from rig.programs import program


def promtool(*arguments, text="", cwd=None):
    """Runs it to its end; returns what it printed. Fails the test if it refuses."""
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], input=text, capture_output=True, text=True, timeout=60, cwd=cwd
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_metrics(text):
    """A scrape as promtool wants it; unchecked where there is no promtool."""
    if shutil.which("promtool"):
        assert promtool("check", "metrics", text=text).strip() == ""


def families_in(text):
    """Names of our metrics that a scrape declares."""
    return set(re.findall(r"^# TYPE (bagua_\w+)", text, re.MULTILINE))
