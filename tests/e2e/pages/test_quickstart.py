"""The script and the commands of docs/quickstart.md, against torch's DDP."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from e2e.conftest import PATIENT_S
from rig.docs import pages

PAGE = (Path(__file__).parents[3] / "docs" / "quickstart.md").read_text()
SMALL = ("--steps", "3", "--width", "64")


def of(page, pattern):
    found = re.search(pattern, page, re.S | re.M)
    assert found is not None, pattern
    return found[1]


@pytest.mark.full
def test_a_fresh_environment(tmp_path):
    """As the page makes it, it has a pip of its own."""
    [command] = pages.run_by("test_a_fresh_environment", "docs/quickstart.md")
    ask = f"{command} && command -v pip && python -c 'import sys; print(sys.prefix)'"
    done = subprocess.run(ask, shell=True, check=True, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert done.stdout.split() == [str(tmp_path / "env" / "bin" / "pip"), str(tmp_path / "env")]


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_script_for_ddp_runs_as_the_page_says(sandbox):
    sandbox.deadline_s = PATIENT_S
    script = sandbox.script("train.py", of(PAGE, r"```python\n(.*?)```"))
    figures = r"(loss [\d.]+, sum of weights [-\d.]+)"
    reference = sandbox.run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, *SMALL)
    assert reference.code == 0, reference.text
    word, converted = re.findall(r"```diff\n(.*?)```", PAGE, re.S)
    [old], [new] = (re.findall(rf"^[{sign}](.*)$", word, re.M) for sign in "-+")
    script.write_text(script.read_text().replace(old, new))
    for change in (None, converted):
        if change is not None:
            before = script.read_text()
            shown = sandbox.bagua("convert", "train.py")
            assert shown.code == 0 and script.read_text() == before
            assert sandbox.bagua("convert", "--write", "train.py").out == shown.out
            changed = set(script.read_text().splitlines()) ^ set(before.splitlines())
            assert changed == set(re.findall(r"^[-+](\w.*)$", change, re.M)), "as the page shows it"
        done = sandbox.bagua("run", "--nproc-per-node", "2", script, *SMALL)
        assert done.code == 0, done.text
        assert of(done.out, figures) == of(reference.out, figures)
