"""``bagua advise`` on recorded profiles: its table, its document, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bagua.base.errors import UsageError
from bagua.cli.advise import measured_network
from bagua.cli.app import app
from bagua.tuning.exchanges import every_text
from bagua.tuning.network import Network
from bagua.tuning.profile import BucketCost, Gradient, StepProfile

MS = 1_000_000
PARAMETERS = tuple(Gradient(f"p{number}", "float32", 1 << 20, (number + 1) * 10 * MS, 1024) for number in range(10))
PROFILE = StepProfile(PARAMETERS, 50 * MS, 100 * MS, 50 * MS, cores=8)


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A profile of one host."""
    PROFILE.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["advise", *arguments], catch_exceptions=True)


def test_the_document_has_every_algorithm(file: str) -> None:
    done = run("--profile", file, "--network", "1gbit,5ms", "--nodes", "16", "--output", "json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["network"], found["nodes"], found["nproc_per_node"]) == ("1gbit,5ms", 16, 1)
    assert sorted(row["algorithm"] for row in found["rows"]) == sorted(every_text(16))
    assert all(row["step_ms"] >= found["compute_ms"] and row["sent_bytes"] >= 0 for row in found["rows"])
    assert found["recommended"][0]["algorithm"] == "gradient_allreduce"
    assert sorted(name for names in found["best_cuts"]["buckets"] for name in names) == sorted(
        p.name for p in PARAMETERS
    )
    needs = {row["optimizer"] for row in found["rows"]}
    assert needs == {None, "QAdamOptimizer", "OneBitAdamOptimizer", "ZeroOneAdamOptimizer"}


def test_the_table_recommends(file: str) -> None:
    done = run("--profile", file, "--network", "100mbit", "--nnodes", "2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 x 1 ranks, 100mbit; 41.9 MB of gradients; 200.0 ms without communication")
    assert sum("recommended" in line for line in lines) == 3
    assert "Keeps the result of gradient all-reduce: --algorithm gradient_allreduce," in done.stdout
    short, long = len(lines), len(run("--profile", file, "--network", "100mbit", "--all").stdout.splitlines())
    assert short < long
    one = run("--profile", file, "--network", "100mbit", "--algorithm", "local_sgd:interval=2", "--nproc-per-node", "4")
    assert "2 x 4 ranks" in one.stdout and "local_sgd:interval=2" in one.stdout


def test_a_picture(file: str, tmp_path: Path) -> None:
    if not importlib.util.find_spec("matplotlib"):
        pytest.skip("matplotlib is an extra")
    assert run("--profile", file, "--network", "1gbit", "--plot", str(tmp_path / "p.png")).exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--network", "1gbit"], "Name a script to record, or a recorded profile"),
        (["--profile", "FILE", "--network", "1gbit", "train.py"], "not both"),
        (["--profile", "FILE"], "The profile does not show a network"),
        (["train.py"], "Say what is between the hosts"),
        (["--profile", "FILE", "--network", "fast"], "is not a network"),
        (["--profile", "no.json", "--network", "1gbit"], "no.json can't be read"),
        (["--profile", "FILE", "--network", "1gbit", "--save", "x.json"], "--profile records nothing"),
        (["--profile", "FILE", "--network", "1gbit", "--algorithm", "best"], "There is no algorithm 'best'"),
        (["--profile", "FILE", "--network", "1gbit", "--plot", "x.txt"], "x.txt"),
        (["--network", "1gbit", "no_such_script.py"], "no_such_script.py does not exist"),
    ],
)
def test_what_is_refused(file: str, arguments: list[str], words: str) -> None:
    done = run(*(file if one == "FILE" else one for one in arguments))
    assert done.exit_code != 0
    assert words in done.output + str(done.exception)


def test_the_network_of_a_recorded_job() -> None:
    truth = Network(1e9, 1e-3)
    costs = [BucketCost(size, size / truth.payload_rate + 2e-3, 0.0) for size in (1 << 20, 4 << 20, 10 << 20)]
    recorded = StepProfile(PARAMETERS, 1, 1, 1, hosts=2, buckets=tuple(costs))
    found = measured_network(recorded)
    assert found.rate == pytest.approx(1e9, rel=1e-6)
    assert found.delay_s == pytest.approx(1e-3, rel=1e-6)
    with pytest.raises(UsageError, match="does not show a network"):
        measured_network(StepProfile(PARAMETERS, 1, 1, 1, hosts=2, buckets=tuple(costs[:1])))
