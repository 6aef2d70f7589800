"""The run of tests/gpu, without a GPU: its sections and their time, what becomes of those that fail, its commands."""

import json
import os
import re
import select
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import findings, kernels, report, run, sections
from gpu.sections import SECTIONS, Section
from rig.docs import pages

TESTS = Path(__file__).resolve().parents[2]


def test_time_is_shared_out():
    groups = sections.groups(SECTIONS)
    assert [len(group) for group in groups] == [1, 1, 1, 1, 1, 1, 3, 1]
    left = run.WHOLE_S - 60
    for number, beside in enumerate(groups):
        share = sections.time_for(beside, groups[number + 1 :], left)
        assert min(one.least_s for one in beside) <= share <= max(one.limit_s for one in beside)
        left -= share
    assert left >= 0
    first, second = Section("a", "", 100, 10, ()), Section("b", "", 100, 30, ())
    for time, share in ((200, 100), (90, 60), (35, 10)):  # at last the second falls away, the first does not
        assert sections.time_for([first], [[second]], time) == share
    assert sections.time_for([first], [], 9) == 0


def test_every_section_is_a_program():
    """It is imported, and its command line is read: without a file for the result it ends with exit code 2."""
    code = f"import runpy, sys; sys.path.insert(0, {str(TESTS)!r}); sys.argv[1:] = ['--seconds', '5']\n"
    for section in SECTIONS:
        code += f"try: runpy.run_module('gpu.{section.name}', run_name='__main__')\n"
        code += f"except SystemExit as end: print('{section.name}', end.code)\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.splitlines() == [f"{section.name} 2" for section in SECTIONS], done.stderr
    assert done.stderr.count("arguments are required: --result") == len(SECTIONS)


@pytest.mark.full
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", [section.name for section in SECTIONS if section.name != "sanitizer"])
def test_a_section_is_rehearsed(name, tmp_path):
    """Over the fakes of CUDA and NCCL and the emulated device nothing fails."""
    command = [sys.executable, "-P", "-m", f"gpu.{name}", "--device", "fake", "--seconds", "240"]
    done = subprocess.run(
        [*command, "--result", tmp_path / "found.json"],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["checks"] and found["finished"]


def test_kernels_are_checked_on_a_stand_in(tmp_path, capsys):
    """The CPU's codecs in the place of the card's: all checks hold; with one bit wrong they do not."""
    found = findings.Findings(tmp_path / "f.json")
    kernels.work(found, "cpu", quick=True)
    assert len(json.loads((tmp_path / "f.json").read_text())["checks"]) > 60 and not found.failed

    class Wrong(kernels.CpuCard):
        def get(self, address, dtype, count):
            values = super().get(address, dtype, count)
            values.view("uint8")[-1:] ^= 1
            return values

    kernels.Codecs(Wrong(), found).compare((127,))
    assert found.failed


NOT_THERE = """
import sys
for name in "sqlalchemy alembic structlog pydantic_settings grpc_health grpc_reflection cryptography optuna".split():
    sys.modules[name] = None  # to import it fails
"""


@pytest.mark.full
def test_sections_need_no_package_that_a_lent_machine_lacks():
    """Of all that the tests of the repository use: programs of sections and ranks are imported, the suite collected."""
    code = f"{NOT_THERE}sys.path.insert(0, {str(TESTS)!r})\nimport importlib, pytest\n"
    for path in sorted((TESTS / "gpu").glob("*.py")):
        code += f"importlib.import_module('gpu.{path.stem}')\n"
    code += (
        "import rig.ranks.rank_main, rig.ranks.fork_server, contract.algorithms.rank_side\nfrom gpu import algorithms\n"
    )
    code += "for part in (*algorithms.parts_for('cuda'), *algorithms.stands_for('cuda')):\n"
    code += "    words = algorithms.command('cuda', part, '/dev/null')[3:]\n"
    code += "    assert pytest.main([*words, '--collect-only', '-qq']) == 0\n"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-1500:]


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


def has_ended(pid):
    """Or does soon: what was killed takes a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with open(descriptor) as process:
        return bool(select.select([process], [], [], 20)[0])


def test_what_hangs_or_dies_or_lacks_something_stops_nothing_else(tmp_path, capsys):
    """It is cut at its share with what it started, what it had found is kept, and only it is left to do."""
    package = tmp_path / "work" / "site" / "gpu"  # found before that of the tests
    package.mkdir(parents=True)
    for name, code in {"__init__": "", "hangs": HANGS, "dies": DIES, "fine": FINE}.items():
        (package / f"{name}.py").write_text(code)
    options = run.arguments(["--out", str(tmp_path), "--work", str(tmp_path / "work")])
    (tmp_path / "report.json").write_text('{"half of')  # an earlier run that was killed
    here = {"torch": "2", "card": "a card", "arch": "9.0"}
    whole = run.Run(options, here, tmp_path / "work")
    whole.lacking = {"kernels"}
    for name in ("hangs", "dies", "lost", "fine"):
        needs = ("kernels",) * (name == "lost")
        whole.do_group([Section(name, name, 60, 1, needs)], 1.0 if name == "hangs" else 60.0)
    told = json.loads((tmp_path / "report.json").read_text())
    assert {name: one["status"] for name, one in told["sections"].items()} == {
        "hangs": report.STOPPED,
        "dies": report.FAILED,
        "lost": report.FAILED,
        "fine": report.OK,
    }
    [child] = told["sections"]["hangs"]["found"]["checks"]
    assert has_ended(int(child["detail"]))
    assert "kernels" in told["sections"]["lost"]["why"]
    assert whole.environment()["BAGUA_DEVICE_KERNELS"] == ""  # no rank tries again to build them
    assert report.to_do(told, ["hangs", "dies", "fine"], told["digest"]) == ["hangs", "dies"]
    assert report.to_do(told, ["fine"], "other sources") == ["fine"]
    assert "Stopped at its limit" in (tmp_path / "report.md").read_text()


def test_left_overs_are_found_by_their_mark():
    child, other = (
        subprocess.Popen(["sleep", "60"], env={"PATH": "/usr/bin:/bin", run.MARK: mark}, start_new_session=True)
        for mark in (str(os.getpid()), "1")
    )
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


PAGES = ("docs/gpu.md", "docs/performance.md", "tests/gpu/README.md")
WITHOUT_GPU = 3  # its exit code


def run_as_written(commands, folder):
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


def test_the_command_of_the_pages(tmp_path, request):
    if torch.cuda.is_available() and not request.config.getoption("--full"):
        pytest.skip("takes nine minutes with a GPU: --full")
    commands = set(pages.run_by("test_the_command_of_the_pages", *PAGES))
    assert commands == {"python tests/gpu/run.py --out report"}
    run_as_written(list(commands), tmp_path)


@pytest.mark.full
def test_the_commands_for_a_short_lease_as_written(tmp_path):
    commands = pages.run_by("test_the_commands_for_a_short_lease_as_written", "tests/gpu/README.md")
    assert len(commands) == 3
    run_as_written(commands, tmp_path)
