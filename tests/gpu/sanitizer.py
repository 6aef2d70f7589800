"""Section: compute-sanitizer over the checks of the kernels, one tool after the other, as long as time lasts."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu import machine
from gpu.findings import Findings, section
from gpu.section_options import options

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 86
"""Exit code that the sanitizer is told to give when it found something."""


def command(program: str, tool: str, result: Path) -> list[str]:
    """One tool over the quick checks."""
    check = [sys.executable, "-m", "gpu.kernels", "--quick", "--device", "cuda", "--result", str(result)]
    return [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *check]


def summary(text: str) -> str:
    """The sanitizer's own words: its lines begin with =====."""
    lines = [line for line in text.splitlines() if line.startswith("=========")]
    return "\n".join(lines[-12:])


def work(findings: Findings, given: Any) -> None:
    """Each tool in turn."""
    program = machine.sanitizer()
    if program is None or given.device != "cuda":
        findings.note(
            "compute-sanitizer is not on this machine." if program is None else "A rehearsal has no GPU to watch."
        )
        return
    deadline = time.monotonic() + given.seconds - 5
    with tempfile.TemporaryDirectory() as folder:
        for index, tool in enumerate(TOOLS):
            share = (deadline - time.monotonic()) / (len(TOOLS) - index)
            with findings.guarded(tool):
                try:
                    done = subprocess.run(
                        command(program, tool, Path(folder) / f"{tool}.json"),
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        timeout=max(1.0, share),
                    )
                except subprocess.TimeoutExpired as error:
                    words = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
                    findings.note(
                        f"{tool}: not over after {share:.0f} s. Until then: {summary(words) or 'nothing found'}"
                    )
                    continue
                print(done.stdout)
                if "Device not supported" in done.stdout:
                    findings.note(f"{tool}: the sanitizer does not support this device here.")
                    continue
                findings.check(f"{tool} is clean", done.returncode == 0, summary(done.stdout))


if __name__ == "__main__":
    sys.exit(section("sanitizer", work, options(__doc__)))
