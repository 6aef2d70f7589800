"""The programs that measure what elastic jobs cost, with and without faults: how they judge, and (--full) that they
run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.elastic_cost import shapes
from tests.bench.elastic_pauses import most
from tests.bench.elastic_rig import Step, pause

HERE = Path(__file__).parent


def diary(*times: float) -> list[Step]:
    return [Step(at, number, 2, number) for number, at in enumerate(times)]


def test_a_pause_is_that_of_the_slowest_rank_beyond_a_step() -> None:
    one, other = diary(1, 2, 3, 4.5, 5.5), diary(1, 2, 3, 7, 8)
    assert pause([one, other], began=3.2, ended=9) == 3
    assert pause([one], began=3.2, ended=9) == 0.5


def test_what_comes_later_is_no_part_of_a_pause() -> None:
    assert pause([diary(1, 2, 3, 4.5, 30)], began=3.2, ended=4) == 0.5


def test_the_longest_of_few_and_all_but_one_of_a_hundred() -> None:
    assert most([3.0, 1.0, 2.0]) == 3
    assert most([float(number) for number in range(200)]) == 198


def test_shapes_are_hosts_and_ranks() -> None:
    assert shapes("1x4,2x1") == [(1, 4), (2, 1)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("elastic_pauses.py", ("--times", "1", "--megabytes", "4", "--ranks", "2", "--hosts", "2")),
        ("elastic_cost.py", ("--shapes", "1x2,2x1", "--steps", "15", "--turn", "5")),
    ],
)
def test_it_runs(program: str, arguments: tuple[str, ...]) -> None:
    command = (sys.executable, "-P", str(HERE / program), *arguments, "--output", "json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    pauses = {"rank", "daemon", "join", "host", "silent", "coordinator", "restart", "undisturbed"}
    assert set(rows) == pauses if "pauses" in program else len(rows) == 2
