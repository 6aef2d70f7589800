"""The sections of tests/gpu, as far as they need no GPU: what they make of what they find."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from contract.algorithms import harness
from gpu import (
    algorithms,
    common,
    driver,
    engine_run,
    features_rank,
    findings,
    group,
    kernels,
    net,
    sanitizer,
    training_rank,
)


def test_what_pytest_says() -> None:
    text = (
        "t.py::test_a[2 hosts x 2-b] PASSED [ 1%]\nt.py::test_c FAILED [ 2%]\nx\nFAILED t.py::test_c - assert 1 == 2\n"
    )
    assert algorithms.outcomes(text) == {"passed": 1, "failed": 1, "error": 0, "skipped": 0}
    assert algorithms.failures(text) == ["t.py::test_c - assert 1 == 2"]
    text = "=== F ===\n___ test_c[a b] ___\nrank 0: no\nrank 1: no\n___ test_d ___\nE why\n=== short summary ===\n"
    assert algorithms.reasons(text) == {"test_c[a b]": "rank 0: no\nrank 1: no\n", "test_d": "E why\n"}


HOLDS_OUT = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: (print("t.py::test_a PASSED [ 1%]", flush=True), time.sleep(0.5), sys.exit(2)))
print("ready", flush=True)
time.sleep(600)
"""


def test_parts_are_interrupted_at_the_same_time() -> None:
    parts = [
        subprocess.Popen([sys.executable, "-c", HOLDS_OUT], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(3)
    ]
    for part in parts:
        assert part.stdout is not None and part.stdout.readline() == "ready\n"
    assert not algorithms.over(parts[0], 0.0)
    algorithms.end(parts)
    assert [part.returncode for part in parts] == [2] * 3
    assert [algorithms.outcomes(part.communicate()[0])["passed"] for part in parts] == [1] * 3


@pytest.mark.parametrize("how", [KeyboardInterrupt(), pytest.fail.Exception("did not end in 0 s")])
def test_what_is_done_is_told_when_the_suite_is_cut(
    how: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests of jobs that all ranks have done are told; the first other one raises the interrupt."""
    monkeypatch.setattr(harness, "UNTIL", time.monotonic())
    runner = harness.Runner("2 hosts x 1", ["one", "two", "three"], lambda: tmp_path)

    class Interrupted:
        hosts: tuple = ()

        def start(self, *_: object, names: list[str], **__: object) -> list:
            assert names == ["one", "two", "three"]
            for name in ("0-0", "0-1", "1-0"):  # rank 1 is at the second job
                torch.save({"result": name}, tmp_path / f"{name}.pt")
            return [types.SimpleNamespace(output="")] * 2

        def wait(self, _: float) -> None:
            raise how

    monkeypatch.setattr(harness, "make_ranks", lambda folder: contextlib.nullcontext(Interrupted()))
    assert runner.result("one") == ["0-0", "0-1"]
    with pytest.raises(KeyboardInterrupt, match="nobody waits"):
        runner.result("two")


def keeps_and_fails(kind: str, port: int, limit_s: float) -> None:
    common.keep({"rank": os.environ["RANK"]})
    raise RuntimeError("in the middle")


def test_what_ranks_have_found_is_kept() -> None:
    """Where they do not come to their end."""
    told: list = []
    with pytest.raises(AssertionError, match="in the middle"):
        engine_run.run_ranks(keeps_and_fails, ((0, 1),), "cpu", "", 60.0, partly=told.extend)
    assert told == [{"rank": "0"}, {"rank": "1"}]


def test_costs_are_predicted() -> None:
    """Before a size is measured: it must not outlast the time there is."""
    assert group.predicted({10: 1.0}, 100) == pytest.approx(15.0)  # nothing but proportion is known
    assert group.predicted({10: 1.0, 20: 1.5}, 100) == pytest.approx(1.5 * 5.5)
    assert group.predicted({10: 1.0, 20: 0.9}, 100) == pytest.approx(1.35)
    assert group.cost_of([]) == 0
    assert group.cost_of([1.0, 2.0]) == pytest.approx(3.0 * (2 + group.FEW_ROUNDS))
    assert group.cost_of([0.001]) == pytest.approx(0.001 * (6 + group.ROUNDS * 40))


def test_errors_of_a_refused_capture_are_all_told() -> None:
    """The end of a capture may fail because of the refusal, and say something else."""
    try:
        try:
            raise ValueError("CUDA graph: not here")
        finally:
            raise RuntimeError("capture was invalidated")
    except RuntimeError as error:
        assert features_rank.words(error) == "capture was invalidated; before that: CUDA graph: not here"


@pytest.mark.parametrize(
    ("case", "found", "ok"),
    [
        ("memory", {"waits": True, "goes_on": True, "hung": False}, True),
        ("memory", {"ended": "RuntimeError: cudaHostRegister: CUDA error 1"}, False),
        ("fault", {"recorded": 710, "never_recorded": 0, "hung": False}, True),
        ("fault", {"recorded": 0, "never_recorded": 0, "hung": False}, False),
        ("host function", {"function_s": 0.9, "held_s": 1.0, "hung": False}, True),
        ("host function", {"blocked": [], "hung": True}, False),
    ],
)
def test_what_the_leg_needs_of_the_driver(
    case: str, found: dict, ok: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = findings.Findings(tmp_path / "f.json")
    driver.tell(told, case, found)
    assert told.failed != ok


def test_what_blocks_in_the_driver_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = findings.Findings(tmp_path / "f.json")
    driver.tell(told, "in cudaFree", {"blocked": ["cudaEventQuery"], "held_s": 1.5, "hung": False})
    driver.tell(told, "a kernel", {"goes_on": False, "hung": False})
    driver.tell(told, "in item()", {"ended": "not over after 30 s"})
    found = json.loads((tmp_path / "f.json").read_text())
    assert not told.failed and len(found["notes"]) == 3 and len(found["tables"]) == 2
    assert found["notes"][0].startswith("cudaEventQuery of a thread blocks while another is in cudaFree")


def test_cases_of_the_driver_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nsleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert driver.run_case("memory", time.monotonic() + 1.2) == {"ended": "not over after 1 s"}
    assert driver.run_case("memory", time.monotonic()) == {"ended": "no time was left for it"}
    program.write_text("#!/bin/sh\necho it broke; exit 3\n")
    assert driver.run_case("memory", time.monotonic() + 20) == {"ended": "exit code 3: it broke\n"}


def test_what_the_sanitizer_says() -> None:
    text = "ok\n========= COMPUTE-SANITIZER\nnoise\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.summary(text).splitlines()[-1] == "========= ERROR SUMMARY: 0 errors"
    command = sanitizer.command("/x/compute-sanitizer", "memcheck", Path("/r"))
    assert command[:3] == ["/x/compute-sanitizer", "--tool", "memcheck"] and "--quick" in command


def test_networks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings.Findings(tmp_path / "f.json")
    net.compare(
        found,
        net.TABLE,
        {"NCCL's sockets": {1024: [3e-6, 5e-6], 16 << 20: [2e-3]}, "Bagua-Net": {1024: [2e-6], 16 << 20: [1.9e-3]}},
    )
    rows = json.loads((tmp_path / "f.json").read_text())["tables"]["all-reduce, 2 ranks on one card"]
    assert [(row["bytes"], row["target"]) for row in rows] == [(1024, "met"), (16 << 20, "missed")]
    assert rows[0]["times"] == pytest.approx(2.0)


def test_kernels_are_checked_on_a_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The CPU's codecs in the place of the card's: all checks hold; with one bit wrong they do not."""
    found = findings.Findings(tmp_path / "f.json")
    kernels.work(found, "cpu", quick=True)
    checks = json.loads((tmp_path / "f.json").read_text())["checks"]
    assert len(checks) > 60 and not found.failed

    class Wrong(kernels.CpuCard):
        def get(self, address, dtype, count):
            values = super().get(address, dtype, count)
            values.view("uint8")[-1:] ^= 1
            return values

    codecs = kernels.Codecs(Wrong(), found)
    codecs.compare((127,))
    assert found.failed


def test_waits_in_a_trace() -> None:
    """Those of torch's threads, between the first step and the last."""
    steps = {"name": training_rank.STEPS, "cat": "user_annotation", "ts": 10.0, "dur": 5.0, "tid": 1}
    works = [{"name": "aten::add", "cat": "cpu_op", "ts": 11.0, "dur": 1.0, "tid": tid} for tid in (1, 2)]
    calls = [
        {"name": name, "cat": "cuda_runtime", "ts": ts, "dur": 1.0, "tid": tid}
        for name, ts, tid in (
            ("cudaLaunchKernel", 12.0, 1),
            ("cudaStreamSynchronize", 13.0, 2),
            ("cudaEventSynchronize", 13.0, 9),  # a thread of the leg
            ("cudaDeviceSynchronize", 16.0, 1),  # the profiler's own
        )
    ]
    assert training_rank.runtime_calls([steps, *works, *calls]) == ["cudaLaunchKernel", "cudaStreamSynchronize"]
