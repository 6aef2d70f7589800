"""Section: what the GPU leg relies on of CUDA's driver, and what it has to live with: which calls block while a stream
waits for the daemon. Only what would stop the leg fails; the rest is told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu.driver_case import CASES, MARK, NOT_READY
from gpu.findings import Findings, section
from gpu.section_options import options

BESIDE = 8
"""Cases that run at a time: most of a case is torch's import and the making of a context."""
CASE_S = 30.0
JUDGED = {
    "memory": "registered memory of a sealed memfd: a stream waits on a word in it",
    "fault": "an event that was recorded once tells of a kernel's failed assertion",
    "host function": "a host function starts while another thread is in a pageable copy that waits for it",
}


def run_case(case: str, deadline: float) -> dict[str, Any]:
    """The findings of the case; {"ended": words} if it has none."""
    command = [sys.executable, "-m", "gpu.driver_case", "--case", case]
    left = min(CASE_S, deadline - time.monotonic())
    if left < 1:
        return {"ended": "no time was left for it"}
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return {"ended": f"not over after {left:.0f} s"}
    _, mark, line = done.stdout.partition(MARK)
    if not mark:
        return {"ended": f"exit code {done.returncode}: {done.stdout[-600:]}"}
    found: dict[str, Any] = json.loads(line.splitlines()[0])
    return found


def tell(findings: Findings, case: str, found: Mapping[str, Any]) -> None:
    """A case's outcome: a check of what the leg can't do without, else facts."""
    if case in JUDGED:
        findings.check(JUDGED[case], holds(case, found), json.dumps(found))
    elif "ended" in found:
        findings.note(f"{case}: {found['ended']}")
    elif case.startswith("in "):
        blocked = ", ".join(found.get("blocked", ()))
        held = found.get("held_s")
        findings.row(
            "calls of another thread while one is in a call, and streams wait",
            main=case,
            **{"held s": "for ever" if held is None else held, "blocked": blocked or "none"},
        )
        if blocked:
            findings.note(f"{blocked} of a thread blocks while another is {case} and a stream waits for the daemon.")
        if found["hung"] or found.get("errors"):
            findings.note(f"{case}: {'it hung' if found['hung'] else ''} {found.get('errors') or ''}")
    else:
        goes_on = found.get("goes_on", False)
        findings.row("work beside streams that wait", work=case, **{"goes on": goes_on})
        if not goes_on:
            findings.note(f"{case} is held up by streams that wait for the daemon.")


def holds(case: str, found: Mapping[str, Any]) -> bool:
    """Whether it is as the leg needs it."""
    if "ended" in found or found["hung"]:
        return False
    if case == "memory":
        return bool(found["waits"] and found["goes_on"])
    if case == "fault":
        return found["recorded"] not in (0, NOT_READY)
    return "function_s" in found and found["function_s"] <= found["held_s"]


def work(findings: Findings, given: Any) -> None:
    """All cases, those that are judged first."""
    if given.device != "cuda":
        findings.note("A rehearsal has no driver to ask.")
        return
    deadline = time.monotonic() + given.seconds - 2
    with ThreadPoolExecutor(BESIDE) as pool:
        for case, found in zip(CASES, pool.map(lambda case: run_case(case, deadline), CASES), strict=True):
            with findings.guarded(case):
                print(case, found)
                tell(findings, case, found)
                if case == "fault" and "never_recorded" in found:
                    findings.note(f"After it an event that was never recorded says {found['never_recorded']}.")


if __name__ == "__main__":
    sys.exit(section("driver", work, options(__doc__)))
