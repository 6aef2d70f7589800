"""The parts of tests/gpu that need no GPU: sections and their time, the report, what is read from other programs'
output, and every section's command line."""

from __future__ import annotations

import contextlib
import json
import os
import select
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
    machine,
    net,
    report,
    run,
    sanitizer,
    sections,
    training_rank,
    tree,
)
from gpu.sections import SECTIONS, Section

TESTS = Path(__file__).resolve().parents[1]


def test_time_is_shared_out() -> None:
    groups = sections.groups(SECTIONS)
    assert [len(group) for group in groups] == [1, 1, 1, 1, 1, 1, 1, 4, 1]
    left = run.WHOLE_S - 60
    for number, beside in enumerate(groups):
        share = sections.time_for(beside, groups[number + 1 :], left)
        assert min(one.least_s for one in beside) <= share <= max(one.limit_s for one in beside)
        left -= share
    assert left >= 0


def test_late_sections_keep_their_least() -> None:
    first, second = Section("a", "a", "", 100, 10), Section("b", "b", "", 100, 30)
    assert sections.time_for([first], [[second]], 200) == 100
    assert sections.time_for([first], [[second]], 90) == 60
    assert sections.time_for([first], [[second]], 35) == 10  # the second falls away, the first does not
    assert sections.time_for([first], [], 9) == 0


def test_sections_by_name() -> None:
    assert [section.name for section in sections.by_name(["net", "kernels"])] == ["kernels", "net"]
    assert len(sections.by_name([])) == len(SECTIONS)
    with pytest.raises(ValueError, match="No section nett"):
        sections.by_name(["nett"])


def test_every_section_is_a_program() -> None:
    """It is imported, and its command line is read: without a file for the result it ends with exit code 2."""
    code = f"import runpy, sys; sys.path.insert(0, {str(TESTS)!r}); sys.argv[1:] = ['--seconds', '5']\n"
    for section in SECTIONS:
        code += f"try: runpy.run_module('gpu.{section.module}', run_name='__main__')\n"
        code += f"except SystemExit as end: print('{section.module}', end.code)\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == [f"{section.module} 2" for section in SECTIONS], done.stderr
    assert done.stderr.count("arguments are required: --result") == len(SECTIONS)


NOT_THERE = """
import sys
for name in "sqlalchemy alembic structlog pydantic_settings grpc_health grpc_reflection cryptography optuna".split():
    sys.modules[name] = None  # to import it fails
"""


def test_sections_need_no_package_that_a_lent_machine_lacks() -> None:
    """Of all that the tests of the repository use: programs of sections and ranks are imported, the suite collected."""
    code = f"{NOT_THERE}sys.path.insert(0, {str(TESTS)!r})\nimport importlib, pytest\n"
    for path in sorted((TESTS / "gpu").glob("*.py")):
        code += f"importlib.import_module('gpu.{path.stem}')\n"
    code += "import rig.rank_main, rig.fork_server, contract.algorithms.rank_side\nfrom gpu import algorithms\n"
    code += "for part in (*algorithms.parts_for('cuda'), *algorithms.stands_for('cuda')):\n"
    code += "    words = algorithms.command('cuda', part)[3:]\n"
    code += "    assert pytest.main([*words, '--collect-only', '-qq']) == 0\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


def test_findings_are_kept_from_the_first_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    found = findings.Findings(path)
    found.check("one", True)
    found.row("figures", bytes=1, us=2.5)
    assert json.loads(path.read_text())["finished"] is False
    with found.guarded("two"):
        pytest.fail("a rank ended")  # as the rig says it: no Exception
    found.finish()
    kept = json.loads(path.read_text())
    assert [check["ok"] for check in kept["checks"]] == [True, False]
    assert "a rank ended" in kept["checks"][1]["detail"]
    assert (kept["finished"], kept["tables"]) == (True, {"figures": [{"bytes": 1, "us": 2.5}]})
    assert found.failed


def found_of(ok: bool, finished: bool = True) -> dict:
    return {"checks": [{"name": "c", "ok": ok, "detail": "why"}], "tables": {}, "notes": [], "finished": finished}


@pytest.mark.parametrize(
    ("found", "code", "status"),
    [
        (found_of(True), 0, report.OK),
        (found_of(False), 1, report.FAILED),
        ({**found_of(True), "checks": []}, 0, report.SKIPPED),
        (found_of(True, finished=False), -11, report.FAILED),
        (found_of(True, finished=False), None, report.STOPPED),
        (None, 1, report.FAILED),
    ],
)
def test_status_of_a_section(found: dict | None, code: int | None, status: str) -> None:
    assert report.status_of(found, code) == status


def test_a_run_goes_on_where_the_last_one_ended() -> None:
    previous = {"digest": "d", "sections": {"a": {"status": report.OK}, "b": {"status": report.STOPPED}}}
    assert report.to_do(previous, ["a", "b", "c"], "d") == ["b", "c"]
    assert report.to_do(previous, ["a", "b", "c"], "other sources") == ["a", "b", "c"]
    assert report.to_do(None, ["a"], "d") == ["a"]


HANGS = """
import json, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
check = {"name": "child", "ok": True, "detail": str(child.pid)}
found = {"checks": [check], "tables": {}, "notes": [], "finished": False}
pathlib.Path(sys.argv[sys.argv.index("--result") + 1]).write_text(json.dumps(found))
time.sleep(600)
"""
DIES = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
FINE = """
import json, pathlib, sys
found = {"checks": [{"name": "c", "ok": True, "detail": ""}], "tables": {}, "notes": [], "finished": True}
pathlib.Path(sys.argv[sys.argv.index("--result") + 1]).write_text(json.dumps(found))
"""


def this_machine(**other: str) -> machine.Machine:
    names = ("torch", "cuda", "card", "nccl", "grpc", "protobuf", "numpy", "pytest")
    return machine.Machine(**{**dict.fromkeys(names, "1"), "python": sys.executable, "arch": "9.0", **other})


def has_ended(pid: int) -> bool:
    """Or does soon: what was killed takes a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(descriptor) as process:
        return bool(select.select([process], [], [], 20)[0])


def test_what_hangs_or_dies_stops_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is cut at its share with what it started, what it had found is kept, and only it is left to do."""
    package = tmp_path / "work" / "site" / "gpu"  # found before that of the tests
    package.mkdir(parents=True)
    for name, code in {"__init__": "", "hangs": HANGS, "dies": DIES, "fine": FINE}.items():
        (package / f"{name}.py").write_text(code)
    options = run.arguments(["--out", str(tmp_path), "--work", str(tmp_path / "work")])
    here = this_machine()
    whole = run.Run(options, here, tmp_path / "work")
    for name in ("hangs", "dies", "fine"):
        whole.do_group([Section(name, name, name, 3, 1)], 3.0)
    told = json.loads((tmp_path / "report.json").read_text())
    assert {name: one["status"] for name, one in told["sections"].items()} == {
        "hangs": report.STOPPED,
        "dies": report.FAILED,
        "fine": report.OK,
    }
    [child] = told["sections"]["hangs"]["found"]["checks"]
    assert has_ended(int(child["detail"]))
    assert report.to_do(told, ["hangs", "dies", "fine"], told["digest"]) == ["hangs", "dies"]
    assert "Stopped at its limit" in (tmp_path / "report.md").read_text()


def test_what_lacks_something_is_told_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "work" / "site" / "gpu"
    package.mkdir(parents=True)
    for name, code in {"__init__": "", "fine": FINE}.items():
        (package / f"{name}.py").write_text(code)
    options = run.arguments(["--out", str(tmp_path), "--work", str(tmp_path / "work"), "--only", "kernels"])
    (tmp_path / "report.json").write_text('{"half of')  # an earlier run that was killed
    whole = run.Run(options, this_machine(grpc="", blind="torch was built without CUDA"), tmp_path / "work")
    assert [section.name for section in whole.to_do] == ["kernels"]
    lost, fine = Section("lost", "lost", "", 3, 1, ("core", *sections.RANKS)), Section("fine", "fine", "", 3, 1)
    whole.do_group([lost, fine], 3.0)
    told = json.loads((tmp_path / "report.json").read_text())["sections"]
    assert told["fine"]["status"] == report.OK and told["lost"]["status"] == report.FAILED
    assert "torch was built without CUDA" in told["lost"]["why"] and "has no grpc" in told["lost"]["why"]


def test_environment_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's packages are found behind ours; kernels that could not be built are not tried again by each rank."""
    monkeypatch.setenv("PYTHONPATH", "/of/the/caller")
    monkeypatch.delenv("BAGUA_DEVICE_KERNELS", raising=False)
    whole = run.Run(run.arguments(["--out", str(tmp_path)]), this_machine(), tmp_path)
    assert whole.environment()["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "site"), str(TESTS), "/of/the/caller"]
    assert "BAGUA_DEVICE_KERNELS" not in whole.environment()
    whole.lacking["kernels"] = "it could not be built"
    assert whole.environment()["BAGUA_DEVICE_KERNELS"] == ""
    monkeypatch.setenv("BAGUA_DEVICE_KERNELS", "/built/elsewhere")
    assert whole.environment()["BAGUA_DEVICE_KERNELS"] == "/built/elsewhere"


def test_a_run_that_is_ended_keeps_what_its_sections_had_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run.Run(run.arguments(["--out", str(tmp_path)]), this_machine(), tmp_path)
    whole.running = [(Section("cut", "cut", "", 3, 1), 0.0)]
    (tmp_path / "cut.json").write_text(json.dumps(found_of(True, finished=False)))
    whole.end()
    told = json.loads((tmp_path / "report.json").read_text())["sections"]["cut"]
    assert told["status"] == report.STOPPED and len(told["found"]["checks"]) == 1


def test_builds_are_kept_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run.cache_folder(tmp_path / "work") == tmp_path / "bagua"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run.cache_folder(tmp_path / "work") == tmp_path / "work" / "cache"


def test_a_card_that_torch_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What needs no torch for CUDA can run."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0'\n")
    program.chmod(0o755)
    probe = "import json; print(json.dumps(dict.fromkeys('torch grpc protobuf numpy pytest'.split(), '1') | "
    monkeypatch.setattr(machine, "_PROBE", probe + "dict.fromkeys('cuda card arch nccl'.split(), '')))")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = machine.find([sys.executable])
    assert (found.card, found.arch) == ("NVIDIA H200", "9.0")
    assert "built without CUDA and sees no GPU" in found.lacking()["torch with CUDA"]
    program.unlink()
    with pytest.raises(machine.NoMachine, match="built without CUDA"):
        machine.find([sys.executable])


def test_report_for_people() -> None:
    section = {
        "title": "Title",
        "status": report.FAILED,
        "seconds": 12.345,
        "why": "Stopped.",
        "found": found_of(False),
    }
    section["found"]["tables"] = {
        "figures": [{"bytes": 1024, "us": 1.23456}, {"bytes": 1 << 20, "us": 4567.8, "target": "met"}]
    }
    whole = {"date": "today", "rehearsal": True, "machine": {"card": "C"}, "seconds": 5.0, "sections": {"a": section}}
    text = report.markdown(whole)
    assert "REHEARSAL" in text
    assert "- FAILED c: why" in text and "Stopped." in text
    assert "| 1024    | 1.23 |" in text and "| 1048576 | 4568 |" in text
    assert "| 0 of 1 | 1 of 1  |" in text
    assert "REHEARSAL" not in report.markdown({**whole, "rehearsal": False})


def test_time_slices_are_told() -> None:
    """Where a hop between two ranks takes so long that their figures say nothing else."""
    row = {"bytes": 1024, "sockets us": 1200.0, "Bagua-Net us": 2100.0}
    found = {**found_of(True), "tables": {net.TABLE: [row, {**row, "bytes": 2048, "sockets us": 3.0}]}}
    assert "1.2 ms" in report.slices({"net": {"found": found}})
    row["sockets us"] = 30.0
    assert report.slices({"net": {"found": found}}) == report.slices({}) == ""


def test_memory_of_the_card() -> None:
    assert machine.parse_memory("1234\n77\n") == 1234
    assert machine.parse_memory("[N/A]\n") is None
    assert machine.parse_memory("") is None


def test_no_gpu_is_said_at_once(tmp_path: Path) -> None:
    blind = tmp_path / "python"
    blind.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without what is installed
    blind.chmod(0o755)
    with pytest.raises(machine.NoMachine, match=r"No such file.*ModuleNotFoundError"):
        machine.find(["/no/such/python", str(blind)])


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.arguments(["--sections", "net"]).sections == run.arguments(["--only", "net"]).sections == ["net"]
    with pytest.raises(SystemExit):
        run.arguments(["--sections", "nett"])
    assert "No section nett" in capsys.readouterr().err


def test_what_pytest_says() -> None:
    text = (
        "t.py::test_a[2 hosts x 2-b] PASSED [ 1%]\nt.py::test_c FAILED [ 2%]\nx\nFAILED t.py::test_c - assert 1 == 2\n"
    )
    assert algorithms.outcomes(text) == {"passed": 1, "failed": 1, "error": 0, "skipped": 0}
    assert algorithms.failures(text) == ["t.py::test_c - assert 1 == 2"]


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


SANITIZER = """#!/bin/sh
echo ========= COMPUTE-SANITIZER
test -n "$BAGUA_DEVICE_KERNELS" || exit 1
case $2 in {slow}) sleep 600 & echo $! >> {children}; wait;; esac
"""


@pytest.mark.parametrize(("slow", "failed"), [("*", True), ("memcheck", False)])
def test_time_for_the_sanitizer(
    slow: str, failed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tool that is cut leaves nothing on the card; where none came to its end nothing was checked."""
    program, children = tmp_path / "sanitizer", tmp_path / "children"
    program.write_text(SANITIZER.format(slow=slow, children=children))
    program.chmod(0o755)
    monkeypatch.setenv("BAGUA_DEVICE_KERNELS", "/a/library")
    told = findings.Findings(tmp_path / "f.json")
    sanitizer.watch(told, str(program), time.monotonic() + 4)
    assert told.failed == failed
    assert all(has_ended(int(line)) for line in children.read_text().split())
    found = json.loads((tmp_path / "f.json").read_text())
    assert len(found["notes"]) == (4 if failed else 1)


def test_what_the_sanitizer_says() -> None:
    text = "ok\n========= COMPUTE-SANITIZER\nnoise\n========= ERROR SUMMARY: 0 errors\n"
    assert sanitizer.summary(text).splitlines()[-1] == "========= ERROR SUMMARY: 0 errors"
    command = sanitizer.command("/x/compute-sanitizer", "memcheck", Path("/r"))
    assert command[:3] == ["/x/compute-sanitizer", "--tool", "memcheck"] and "--quick" in command


def test_networks_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings.Findings(tmp_path / "f.json")
    net.compare(
        found,
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


def test_packages_of_the_tree_are_importable(tmp_path: Path) -> None:
    site = tree.make_site(tmp_path / "site")
    code = "import bagua.csrc.build, bagua.proto, bagua.daemon.node.state; print(bagua.csrc.build.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(site)


def test_left_overs_are_found_by_their_mark() -> None:
    child = subprocess.Popen(
        ["sleep", "60"], env={"PATH": "/usr/bin:/bin", run.MARK: str(os.getpid())}, start_new_session=True
    )
    other = subprocess.Popen(["sleep", "60"], env={"PATH": "/usr/bin:/bin", run.MARK: "1"}, start_new_session=True)
    try:
        # The child has its environment once it is the new program.
        while b"sleep" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
            pass
        assert run.sweep() == 1
        assert child.wait(20) == -9
        assert other.poll() is None
    finally:
        for process in (child, other):
            process.kill()
            process.wait()


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
