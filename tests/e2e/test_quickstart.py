"""The script and the commands of docs/quickstart.md, against torch's DDP."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Sandbox

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
SMALL = ("--steps", "3", "--width", "64")


def of(page: str, pattern: str) -> str:
    found = re.search(pattern, page, re.S | re.M)
    assert found is not None, pattern
    return found[1]


@pytest.mark.full
def test_a_script_for_ddp_runs_after_two_lines_were_changed(sandbox: Sandbox) -> None:
    script = sandbox.script("train.py", of(PAGE, r"```python\n(.*?)```"))
    before = script.read_text()
    reference = sandbox.run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *SMALL)
    assert reference.code == 0, reference.text
    subprocess.run(of(PAGE, r"^    (sed .*?)$"), shell=True, check=True, cwd=sandbox.folder)
    changed = set(script.read_text().splitlines()) ^ set(before.splitlines())
    assert changed == set(re.findall(r"^[-+](\w.*)$", of(PAGE, r"```diff\n(.*?)```"), re.M)), "as the page shows it"
    done = sandbox.bagua("run", "--nproc-per-node", "2", script, *SMALL)
    assert done.code == 0, done.text
    assert of(done.out, r"(loss [\d.]+)") == of(reference.out, r"(loss [\d.]+)")
