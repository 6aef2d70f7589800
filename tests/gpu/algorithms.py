"""Section: the contract suite of tests/contract/algorithms with models on the card, all routes side by side.

Every algorithm against one process of plain torch on the CPU, step by step.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.engine_run import over_bagua_net
from gpu.findings import Findings, section
from gpu.section_options import options

TESTS = Path(__file__).resolve().parents[1]
SUITE = TESTS / "contract" / "test_algorithms.py"
BAGUA_NET, SOCKETS = "Bagua-Net", "NCCL's sockets"
# Hierarchical needs several ranks on each of several hosts. All ranks are hosts of their own to NCCL: it goes over the
# network between them.
PARTS = (
    ("flat", BAGUA_NET, "reference or stands"),
    ("staged", "", "reference and hosts"),
    ("hierarchical", SOCKETS, "reference and hosts"),
)
"""(route, NCCL's network, which tests of the suite)"""
REHEARSED = {
    "cpu": (("", "", "reference and 1 and rank and gradient"),),
    "fake": (
        ("flat", "", "reference and x and bytegrad and not everywhere"),
        ("staged", "", "reference and x and decentralized and not low"),
        ("hierarchical", "", "reference and x and minmax8 and gradient"),
    ),
}
GRACE_S = 8.0
"""After an interrupt pytest lists what failed until then."""
_LINE = re.compile(r"^\S.*::.* (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*)$", re.MULTILINE)


def outcomes(text: str) -> dict[str, int]:
    """How many tests ended how, by the lines that pytest -v writes; also where it was stopped."""
    kinds = _LINE.findall(text)
    return {kind.lower(): kinds.count(kind) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}


def failures(text: str) -> list[str]:
    """Names of the tests that pytest lists as failed at its end."""
    return _FAILED.findall(text)


def command(device: str, route: str, which: str) -> list[str]:
    """pytest with settings of its own: those of the repository need plugins that may not be installed."""
    settings, tests = str(TESTS / "gpu" / "pytest.ini"), str(TESTS)
    return [
        *(sys.executable, "-m", "pytest", "-v", "-rfE", "-c", settings, "--rootdir", tests, "--confcutdir", tests),
        *("-p", "no:cacheprovider", str(SUITE), "--device", device, "--route", route, "-k", which),
    ]


def end(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """The exit code; None if it had to be interrupted."""
    try:
        return process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None


def work(findings: Findings, given: Any) -> None:
    """All parts side by side; what is there when time is over counts."""
    deadline = time.monotonic() + given.seconds - 2 * GRACE_S
    parts = REHEARSED.get(given.device, PARTS)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for index, (route, network, which) in enumerate(parts):
            log = Path(folder) / f"{index}.log"
            also = over_bagua_net(given.device) if network == BAGUA_NET else {}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command(given.device, route, which),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **also},
                )
            started.append((" over ".join(filter(None, (route, network))), process, log))
        for route, process, log in started:
            code = end(process, deadline)
            tell(findings, route, code, log.read_text(errors="replace"))


def tell(findings: Findings, route: str, code: int | None, text: str) -> None:
    """One part's outcome."""
    print(text)
    found = outcomes(text)
    findings.row("tests of the contract suite", route=route or "cpu", **found)
    for name in failures(text)[:30]:
        findings.check(f"{route}: {name[:200]}", False)
    if code is None:
        findings.check(f"{route}: the suite came to its end", False, text[-600:])
    elif code or not found["passed"]:
        findings.check(f"{route}: the suite passed", False, text[-1500:])
    else:
        findings.check(f"{route}: {found['passed']} tests of the suite passed", True)


if __name__ == "__main__":
    sys.exit(section("algorithms", work, options(__doc__)))
