"""`bagua chaos` finds nothing, and says when it finds something."""

import importlib.util
import json

import pytest

from bagua.chaos.plan import KINDS as KINDS_OF_FAULTS
from bagua.cli.faults.postgres import find_binaries

KINDS = "kill-rank,corrupt-link,kill-coordinator,stop-keeper,delay-link,deep-tree,kill-starting-keeper"
LONG = "kill-newcomer,kill-taker,scale,drain,kill-leader,kill-database,other-release,sleep"


@pytest.mark.full  # test_elastic_promise.py kills ranks, and the data plane's tests break connections
def test_chaos(sandbox):
    shape = ("--nnodes", "2", "--nproc-per-node", "1", "--seed", "16")  # the rank is killed last
    done = sandbox.bagua("chaos", "--minutes", "3", "--faults", "7", "--kinds", KINDS, *shape, "--output", "json")
    assert done.code == 0, done.text
    found = json.loads(done.out)
    rows = {row["kind"]: row["times"] for row in found["kinds"]}
    assert rows == {**dict.fromkeys(KINDS.split(","), 1), **({"join": 1} if "join" in rows else {})}
    assert found["broken"] == {} and found["epochs"] > 0 and found["jobs"] == 1
    sandbox.assert_all_gone(within=20)


@pytest.mark.full
def test_newcomers_and_two_coordinators(sandbox):
    if find_binaries() is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("PostgreSQL: no binaries on this machine, or no package psycopg")
    shape = ("--nnodes", "2", "--nproc-per-node", "1", "--postgresql", "--log-dir", sandbox.folder / "logs")
    done = sandbox.bagua("chaos", "--minutes", "7", "--faults", "8", "--kinds", LONG, *shape, deadline=500.0)
    assert done.code == 0, done.text
    assert "kill-taker" in done.out and "8 faults in" in done.out and "No promises broken." in done.out
    assert [path.name for path in (sandbox.folder / "logs").glob("coordinator*")]
    assert list((sandbox.folder / "logs").rglob("diary-*"))
    sandbox.assert_all_gone(within=20)


def test_bad_options(sandbox):
    done = sandbox.bagua("chaos", "--kinds", "kill-rank,fire")
    assert done.code == 2 and "There is no fault 'fire'" in done.err
    listed = sandbox.bagua("chaos", "--list").out.splitlines()
    assert [line.split()[0] for line in listed[1:] if line[0] != " "] == list(KINDS_OF_FAULTS)
