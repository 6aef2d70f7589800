"""Sections ``algorithms`` and ``stands``: the contract suite of tests/contract/algorithms with models on the card.

``algorithms``: every algorithm against one process of plain torch on the CPU, step by step, by all routes side by side.
``stands``: what every algorithm must stand beside that, and ranks that are lost, and join.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contract.algorithms import load_cases

from gpu.engine_run import over_bagua_net
from gpu.findings import Findings, section
from gpu.section_options import options

TESTS = Path(__file__).resolve().parents[1]
SUITE = TESTS / "contract" / "test_algorithms.py"
ELASTIC = tuple(str(TESTS / "contract" / f"test_algorithms_{what}_device.py") for what in ("losses", "joins"))
BAGUA_NET, SOCKETS = "Bagua-Net", "NCCL's sockets"
WORLD = "2 hosts x 2"  # the only one with several ranks on each of several hosts, which hierarchical demands


@dataclass(frozen=True)
class Part:
    """``route``: how operations travel; ``network``: NCCL's. All ranks are hosts of their own to NCCL, so it goes over
    the network between them. ``tests``: pytest's words for the tests of the suite."""

    route: str
    network: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return " over ".join(filter(None, (self.route, self.network))) or "CPU"


def references(*words: str) -> tuple[str, ...]:
    """The comparisons with the reference in WORLD, of cases whose name has one of the words; all if there are none."""
    cases = [name for name, case in load_cases().items() if WORLD in case.worlds]
    chosen = [name for name in cases if not words or any(word in name for word in words)]
    return tuple(f"{SUITE}::test_equals_reference[{WORLD}-{name}]" for name in chosen)


def parts_for(device: str) -> tuple[Part, ...]:
    """Algorithms that run side by side; in a rehearsal a few cases of each."""
    if device == "cpu":
        return (Part("", "", references("gradient_allreduce")),)
    if device == "fake":
        return (
            Part("flat", "", references("bytegrad")),
            Part("staged", "", references("decentralized hosts", "qadam")),
            Part("hierarchical", "", references("gradient_allreduce minmax8")),
        )
    return (
        Part("flat", BAGUA_NET, references()),
        Part("staged", "", references()),
        Part("hierarchical", SOCKETS, references()),
    )


def stands_for(device: str) -> tuple[Part, ...]:
    """Of the section ``stands``."""
    if device != "cuda":
        return (Part("flat" if device == "fake" else "", "", (str(SUITE), "-k", "stands and bytegrad and trains")),)
    return (Part("flat", BAGUA_NET, (str(SUITE), "-k", "stands and trains")), Part("staged", "", ELASTIC))


GRACE_S = 8.0
"""For the tests of jobs that are done to be told once the time of ranks is over, and after an interrupt for the list of
what failed."""
INTERRUPTED = 2
"""pytest's exit code."""
JOB_SHARE = 1 / 6
"""Of the time. A rank that takes longer for a job ends, and the others with it: a hang costs no more than this."""
_LINE = re.compile(r"^\S.*::.* (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*)$", re.MULTILINE)
_WHY = re.compile(r"^_{3,} (\S.*?) _{3,}\n(.*?)(?=^_{3,} |^={3,} )", re.MULTILINE | re.DOTALL)


def outcomes(text: str) -> dict[str, int]:
    """How many tests ended how, by the lines that pytest -v writes; also where it was stopped."""
    kinds = _LINE.findall(text)
    return {kind.lower(): kinds.count(kind) for kind in ("PASSED", "FAILED", "ERROR", "SKIPPED")}


def failures(text: str) -> list[str]:
    """Names of the tests that pytest lists as failed at its end."""
    return _FAILED.findall(text)


def reasons(text: str) -> dict[str, str]:
    """By the name of a test, without its file: what pytest writes of its failure."""
    return dict(_WHY.findall(text))


def command(device: str, part: Part) -> list[str]:
    """pytest with settings of its own: those of the repository need plugins that may not be installed."""
    settings, tests = str(TESTS / "gpu" / "pytest.ini"), str(TESTS)
    return [
        *(sys.executable, "-m", "pytest", "-v", "-rfE", "-c", settings, "--rootdir", tests, "--confcutdir", tests),
        *("--full", "-p", "no:cacheprovider", "--device", device, "--route", part.route, *part.tests),
    ]


def over(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Whether it comes to its end in time."""
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupts all, and only then waits for each: they take as long as one."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        if not over(process, deadline):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def work(findings: Findings, parts: Sequence[Part], given: Any) -> None:
    """All parts side by side; what is there when time is over counts."""
    deadline = time.monotonic() + given.seconds - GRACE_S
    limits = {
        "BAGUA_TEST_JOB_S": f"{given.seconds * JOB_SHARE:.0f}",
        "BAGUA_TEST_UNTIL": f"{deadline - 2 * GRACE_S}",
    }
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for index, part in enumerate(parts):
            log = Path(folder) / f"{index}.log"
            also = over_bagua_net(given.device) if part.network == BAGUA_NET else {}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command(given.device, part),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**limits, **os.environ, "OMP_NUM_THREADS": "1", **also},
                )
            started.append((part.name, process, log))
        late = [one for one in started if not over(one[1], deadline)]
        end([process for _, process, _ in late])
        for one in started:
            name, process, log = one
            tell(findings, name, None if one in late else process.returncode, log.read_text(errors="replace"))


def tell(findings: Findings, name: str, code: int | None, text: str) -> None:
    """One part's outcome."""
    print(text)
    found, why = outcomes(text), reasons(text)
    findings.row("tests of the contract suite", part=name, **found)
    for test in failures(text)[:30]:
        detail = next((words for label, words in why.items() if test.partition("::")[2].startswith(label)), "")
        findings.check(f"{name}: {test[:200]}", False, detail[-1500:])
    if code in (None, INTERRUPTED):
        findings.check(f"{name}: the suite came to its end", False, text[-600:])
    elif code or not found["passed"]:
        findings.check(f"{name}: the suite passed", False, text[-1500:])
    else:
        findings.check(f"{name}: {found['passed']} tests of the suite passed", True)


def run(name: str, parts: Callable[[str], tuple[Part, ...]]) -> int:
    """The main program of a section of these parts."""
    return section(name, lambda findings, given: work(findings, parts(given.device), given), options(__doc__))


if __name__ == "__main__":
    sys.exit(run("algorithms", parts_for))
