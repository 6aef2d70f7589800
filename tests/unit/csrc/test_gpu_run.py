"""The run of tests/gpu, without a GPU: sections and their time, what becomes of those that fail, the report."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu import (
    findings,
    machine,
    net,
    report,
    run,
    sanitizer,
    sections,
    tree,
)
from gpu.sections import SECTIONS, Section
from rig.docs import pages

TESTS = Path(__file__).resolve().parents[2]


def test_time_is_shared_out() -> None:
    groups = sections.groups(SECTIONS)
    assert [len(group) for group in groups] == [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 1]
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


def test_commands_for_a_short_lease() -> None:
    """Those of the README are read, and their sections fit into the time that they are given."""
    readme = (TESTS / "gpu" / "README.md").read_text()
    lines = [line.split() for line in readme.splitlines() if "tests/gpu/run.py --out" in line and "--only" in line]
    commands = [line for line in lines if "--seconds" in line]
    assert len(commands) == 3
    for words in commands:
        options = run.arguments(words[words.index("tests/gpu/run.py") + 1 :])
        assert sum(section.limit_s for section in sections.by_name(options.sections)) < options.seconds


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


@pytest.mark.full
def test_sections_need_no_package_that_a_lent_machine_lacks() -> None:
    """Of all that the tests of the repository use: programs of sections and ranks are imported, the suite collected."""
    code = f"{NOT_THERE}sys.path.insert(0, {str(TESTS)!r})\nimport importlib, pytest\n"
    for path in sorted((TESTS / "gpu").glob("*.py")):
        code += f"importlib.import_module('gpu.{path.stem}')\n"
    code += (
        "import rig.ranks.rank_main, rig.ranks.fork_server, contract.algorithms.rank_side\nfrom gpu import algorithms\n"
    )
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


@pytest.mark.full
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
    """Sections that need no torch for CUDA can run."""
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


PAGES = ("docs/gpu.md", "docs/performance.md", "tests/gpu/README.md")
WITHOUT_GPU = 3  # its exit code


def run_as_written(commands: list[str], folder: Path) -> None:
    """Runs these commands of a page in a copy of the checkout: to their end, or until they say that there is no GPU."""
    for path in TESTS.parent.glob("[!.]*"):
        (folder / path.name).symlink_to(path)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("PYTHONSAFEPATH", None)
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
        )
        if torch.cuda.is_available():
            assert done.returncode == 0, done.stdout + done.stderr
        else:
            assert done.returncode == WITHOUT_GPU, done.stdout + done.stderr
            assert re.search("No GPU can be used here.*sees no GPU", done.stdout + done.stderr)


def test_the_command_of_the_pages(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available() and not request.config.getoption("--full"):
        pytest.skip("takes nine minutes with a GPU: --full")
    commands = set(pages.run_by("test_the_command_of_the_pages", *PAGES))
    assert commands == {"python tests/gpu/run.py --out report"}
    run_as_written(list(commands), tmp_path)


@pytest.mark.full
def test_the_commands_for_a_short_lease_as_written(tmp_path: Path) -> None:
    commands = pages.run_by("test_the_commands_for_a_short_lease_as_written", "tests/gpu/README.md")
    assert len(commands) == 3
    run_as_written(commands, tmp_path)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.arguments(["--sections", "net"]).sections == run.arguments(["--only", "net"]).sections == ["net"]
    with pytest.raises(SystemExit):
        run.arguments(["--sections", "nett"])
    assert "No section nett" in capsys.readouterr().err


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


def test_packages_of_the_tree_are_importable(tmp_path: Path) -> None:
    site = tree.make_site(tmp_path / "site")
    code = "import bagua.csrc.build, bagua.proto, bagua.daemon.node.rules.state; print(bagua.csrc.build.__file__)"
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
