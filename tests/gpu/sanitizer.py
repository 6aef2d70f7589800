"""Section: compute-sanitizer over the checks of the kernels, one tool after the other, as long as time lasts."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bagua.csrc
from gpu import machine
from gpu.findings import section

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 86
"""Exit code that the sanitizer is told to give when it found something."""


def command(program, tool, result):
    """One tool over the quick checks."""
    check = [sys.executable, "-m", "gpu.kernels", "--quick", "--device", "cuda", "--result", str(result)]
    return [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", *check]


def summary(text):
    """The sanitizer's own words: its lines begin with =====."""
    lines = [line for line in text.splitlines() if line.startswith("=========")]
    return "\n".join(lines[-12:])


def run_tool(words, limit_s):
    """Exit code and output; None if it had to be ended, with what it watches: the sanitizer starts that as a process
    of its own, which would go on, and hold the card."""
    # Else the sanitizer would watch nvcc.
    kernels = os.environ.get("BAGUA_DEVICE_KERNELS") or str(bagua.csrc.kernels_library())
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "BAGUA_DEVICE_KERNELS": kernels},
        )
        try:
            code = process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = None
            process.wait()
        output.seek(0)
        return code, output.read()


def work(findings, given):
    program = machine.sanitizer()
    if program is None or given.device != "cuda":
        findings.note(
            "compute-sanitizer is not on this machine." if program is None else "A rehearsal has no GPU to watch."
        )
        return
    deadline = time.monotonic() + given.seconds - 5
    watch(findings, program, deadline)


def watch(findings, program, deadline):
    """Each tool in turn; fails if time sufficed for none."""
    late, over = [], []
    with tempfile.TemporaryDirectory() as folder:
        for index, tool in enumerate(TOOLS):
            share = (deadline - time.monotonic()) / (len(TOOLS) - index)
            with findings.guarded(tool):
                code, words = run_tool(command(program, tool, Path(folder) / f"{tool}.json"), share)
                print(words)
                if code is None:
                    late.append(tool)
                    until = summary(words) or "nothing found"
                    findings.note(f"{tool}: not over after {share:.0f} s. Until then: {until}")
                elif "Device not supported" in words:
                    findings.note(f"{tool}: the sanitizer does not support this device here.")
                else:
                    over.append(findings.check(f"{tool} is clean", code == 0, summary(words)))
    if late and not over:
        findings.check("a tool came to its end", False, f"not {', '.join(late)}: time did not suffice")


if __name__ == "__main__":
    sys.exit(section("sanitizer", work, __doc__))
