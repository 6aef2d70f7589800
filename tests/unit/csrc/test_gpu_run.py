"""The run of tests/gpu, without a GPU: its sections and their time, what becomes of those that fail, its commands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu.sections import SECTIONS
from rig.docs import pages

TESTS = Path(__file__).resolve().parents[2]


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
