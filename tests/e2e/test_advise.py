"""``bagua advise`` on a script: it is recorded, ended, and advised on."""

import json
import subprocess
import sys

import pytest

from bagua.tuning.profile import REFERENCE, StepProfile

DEADLINE_S = 300.0  # a rank that imports torch, and the advice: 15 s of a core
SCRIPT = """
import sys, torch, bagua.torch_api as bagua
bagua.init_process_group()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.with_bagua([optimizer])
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
print("the end of the script")
"""


def advise(folder, *arguments):
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "bagua.cli.main", "advise", "--network", "1gbit", "--steps", "3", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder)


@pytest.mark.full
def test_a_script(tmp_path):
    done = advise(tmp_path, "--save", "p.json", "--output", "json", "train.py", "1000")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["recorded_steps"], found["model_bytes"]) == (3, 4 * (64 * 64 + 64 + 64 * 8 + 8))
    assert "3 steps were recorded; the script ends here" in done.stderr
    assert "the end of the script" not in done.stderr
    saved = StepProfile.load(tmp_path / "p.json")
    assert set(saved.speeds.codecs) == set(REFERENCE.codecs)
    assert saved.speeds != REFERENCE


@pytest.mark.full
def test_a_script_that_is_too_short(tmp_path):
    done = advise(tmp_path, "train.py", "6")
    assert done.returncode != 0
    assert "train.py ended before 3 training steps" in done.stderr and "--steps" in done.stderr
    assert "the end of the script" in done.stderr
    assert "ended after 6 training steps, and 8 are needed" in done.stderr
