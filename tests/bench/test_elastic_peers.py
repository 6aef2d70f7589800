"""The comparison with other elastic systems: how it judges, and (--full) that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.elastic_peers import Found, Step, judge

HERE = Path(__file__).parent


def steps(*times: float, first: int = 1, tried: int = 0) -> list[Step]:
    return [Step(at, first + index, 2, first + index + tried) for index, at in enumerate(times)]


def test_a_pause_is_between_new_steps_of_those_that_are_left() -> None:
    left = steps(1, 2, 3) + steps(6, 7, first=4, tried=1)
    found = judge({10: left, 11: steps(1, 2, 3)}, victim=11, killed_at=3.5)
    assert found == Found(pause_s=2, step_s=1, in_vain=1)


def test_steps_that_are_done_again_are_not_new() -> None:
    before = {10: steps(1, 2, 3), 11: steps(1, 2, 3)}
    again = {12: steps(8, 9, 10, 11, first=2), 13: steps(8, 9, 10, 11, first=2)}
    found = judge(before | again, victim=11, killed_at=3.5)
    assert found == Found(pause_s=6, step_s=1, in_vain=2), "steps 2 and 3 were done twice; step 4 came at 10"


@pytest.mark.full
def test_the_comparison_runs(tmp_path: Path) -> None:
    size = ("--ranks", "2", "--megabytes", "4", "--rounds", "1", "--steps", "3", "--log", str(tmp_path / "log"))
    command = (sys.executable, "-P", str(HERE / "elastic_peers.py"), *size, "--output", "json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["found"]["bagua"][0]["in_vain"] == 0 and "torchrun" in document["found"]
    if "torchft" in document["missing"]:
        pytest.skip(f"bagua and torchrun ran; torchft: {document['missing']['torchft']}")
