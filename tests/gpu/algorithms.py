"""Sections ``algorithms`` and ``stands``: the contract suite of tests/contract/algorithms with models on the card.

``algorithms``: every algorithm against one process of plain torch on the CPU, step by step, by all routes side by side.
``stands``: what every algorithm must stand beside that, and ranks that are lost, and join.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from contract.algorithms import load_cases

from gpu.engine_run import over_bagua_net
from gpu.findings import section

TESTS = Path(__file__).resolve().parents[1]
SUITE = TESTS / "contract" / "test_algorithms.py"
ELASTIC = str(TESTS / "contract" / "test_algorithms_elastic_device.py")
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
    def name(self):
        return " over ".join(filter(None, (self.route, self.network))) or "CPU"


def references(*words):
    """The comparisons with the reference in WORLD, of cases whose name has one of the words; all if there are none."""
    cases = [name for name, case in load_cases().items() if WORLD in case.worlds]
    chosen = [name for name in cases if not words or any(word in name for word in words)]
    return tuple(f"{SUITE}::test_equals_reference[{WORLD}-{name}]" for name in chosen)


def parts_for(device):
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


def stands_for(device):
    if device != "cuda":
        return (Part("flat" if device == "fake" else "", "", (str(SUITE), "-k", "stands and bytegrad and trains")),)
    return (Part("flat", BAGUA_NET, (str(SUITE), "-k", "stands and trains")), Part("staged", "", (ELASTIC,)))


GRACE_S = 8.0
"""For the tests of jobs that are done to be told once the time of ranks is over, and after an interrupt for the list of
what failed."""
INTERRUPTED = 2
"""pytest's exit code."""
JOB_SHARE = 1 / 6
"""Of the time. A rank that takes longer for a job ends, and the others with it: a hang costs no more than this."""


def command(device, part, report):
    """pytest with settings of its own: those of the repository need plugins that may not be installed."""
    settings, tests = str(TESTS / "gpu" / "pytest.ini"), str(TESTS)
    return [
        *(sys.executable, "-m", "pytest", "-v", "-c", settings, "--rootdir", tests, "--confcutdir", tests),
        *("--full", "-p", "no:cacheprovider", f"--junitxml={report}", "--device", device, "--route", part.route),
        *part.tests,
    ]


def over(process, deadline):
    """Whether it comes to its end in time."""
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def end(processes):
    """Interrupts all, and only then waits for each: they take as long as one."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        if not over(process, deadline):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def work(findings, parts, given):
    """All parts side by side; what is there when time is over counts."""
    deadline = time.monotonic() + given.seconds - GRACE_S
    limits = {
        "BAGUA_TEST_JOB_S": f"{given.seconds * JOB_SHARE:.0f}",
        "BAGUA_TEST_UNTIL": f"{deadline - 2 * GRACE_S}",
    }
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for index, part in enumerate(parts):
            log, report = Path(folder) / f"{index}.log", Path(folder) / f"{index}.xml"
            also = over_bagua_net(given.device) if part.network == BAGUA_NET else {}
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command(given.device, part, report),
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    env={**limits, **os.environ, "OMP_NUM_THREADS": "1", **also},
                )
            started.append((part.name, process, log, report))
        late = [one for one in started if not over(one[1], deadline)]
        end([one[1] for one in late])
        for one in started:
            name, process, log, report = one
            print(log.read_text(errors="replace"))
            tell(findings, name, None if one in late else process.returncode, report, log)


def tell(findings, name, code, report, log):
    """One part's outcome, by the document that pytest writes also where it was interrupted."""
    cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    bad = [(case, why) for case in cases for why in case if why.tag in ("failure", "error")]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len({case for case, _ in bad}) - skipped
    findings.row("tests of the contract suite", part=name, passed=passed, failed=len(bad), skipped=skipped)
    for case, why in bad[:30]:
        findings.check(f"{name}: {case.get('name')}", False, (why.text or "")[-1500:])
    if code in (None, INTERRUPTED):
        findings.check(f"{name}: the suite came to its end", False, log.read_text(errors="replace")[-600:])
    elif code or not passed:
        findings.check(f"{name}: the suite passed", False, log.read_text(errors="replace")[-1500:])
    else:
        findings.check(f"{name}: {passed} tests of the suite passed", True)


def run(name, parts):
    return section(name, lambda findings, given: work(findings, parts(given.device), given), __doc__)


if __name__ == "__main__":
    sys.exit(run("algorithms", parts_for))
