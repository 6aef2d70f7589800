"""``bagua advise`` on recorded profiles: its table, its document, and what it refuses."""

import json

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
def file(tmp_path):
    """A profile of one host."""
    PROFILE.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def run(*arguments):
    return CliRunner().invoke(app, ["advise", *arguments], catch_exceptions=True)


def test_the_document_has_every_algorithm(file):
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


def test_the_network_of_a_recorded_job():
    truth = Network(1e9, 1e-3)
    costs = [BucketCost(size, size / truth.payload_rate + 2e-3, 0.0) for size in (1 << 20, 4 << 20, 10 << 20)]
    recorded = StepProfile(PARAMETERS, 1, 1, 1, hosts=2, buckets=tuple(costs))
    found = measured_network(recorded)
    assert found.rate == pytest.approx(1e9, rel=1e-6)
    assert found.delay_s == pytest.approx(1e-3, rel=1e-6)
    # Places of an island share the wire: a bucket of each is on it at a time.
    of_islands = StepProfile(
        PARAMETERS,
        1,
        1,
        1,
        hosts=2,
        ranks_per_host=2,
        island_size=2,
        buckets=tuple(BucketCost(cost.bytes // 2, cost.wire_s, 0.0) for cost in costs),
    )
    assert measured_network(of_islands).rate == pytest.approx(1e9, rel=1e-6)
    with pytest.raises(UsageError, match="does not show a network"):
        measured_network(StepProfile(PARAMETERS, 1, 1, 1, hosts=2, buckets=tuple(costs[:1])))
