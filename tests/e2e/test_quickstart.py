"""The script and the commands of docs/quickstart.md, against torch's DDP."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from e2e.conftest import PATIENT_S
from rig import pages

if TYPE_CHECKING:
    from tests.e2e.conftest import Sandbox

PAGE = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()
SMALL = ("--steps", "3", "--width", "64")


def of(page: str, pattern: str) -> str:
    found = re.search(pattern, page, re.S | re.M)
    assert found is not None, pattern
    return found[1]


USUAL = """
def setup(rank, world_size):
    from torch.nn.parallel import DistributedDataParallel as DDP
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    torch.distributed.init_process_group(backend="gloo")
    dist.destroy_process_group()
"""
CHANGED = """
def setup(rank, world_size):
    import bagua.torch_api as bagua
    from bagua.torch_api.data_parallel import DistributedDataParallel as DDP
    bagua.init_process_group()
    bagua.init_process_group()
    dist.destroy_process_group()
"""


def change(folder: Path) -> None:
    """As the page says."""
    subprocess.run(of(PAGE, r"^    (sed .*?)$"), shell=True, check=True, cwd=folder)


def test_lines_are_changed_as_tutorials_write_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(USUAL)
    change(tmp_path)
    assert script.read_text() == CHANGED


@pytest.mark.full
def test_a_fresh_environment(tmp_path: Path) -> None:
    """As the page makes it, it has a pip of its own."""
    [command] = pages.run_by("test_a_fresh_environment", "docs/quickstart.md")
    ask = f"{command} && command -v pip && python -c 'import sys; print(sys.prefix)'"
    done = subprocess.run(ask, shell=True, check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == [str(tmp_path / "env" / "bin" / "pip"), str(tmp_path / "env")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_script_for_ddp_runs_after_two_lines_were_changed(sandbox: Sandbox) -> None:
    sandbox.deadline_s = PATIENT_S
    script = sandbox.script("train.py", of(PAGE, r"```python\n(.*?)```"))
    before = script.read_text()
    reference = sandbox.run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *SMALL)
    assert reference.code == 0, reference.text
    change(sandbox.folder)
    changed = set(script.read_text().splitlines()) ^ set(before.splitlines())
    assert changed == set(re.findall(r"^[-+](\w.*)$", of(PAGE, r"```diff\n(.*?)```"), re.M)), "as the page shows it"
    done = sandbox.bagua("run", "--nproc-per-node", "2", script, *SMALL)
    assert done.code == 0, done.text
    figures = r"(loss [\d.]+, sum of weights [-\d.]+)"
    assert of(done.out, figures) == of(reference.out, figures)
