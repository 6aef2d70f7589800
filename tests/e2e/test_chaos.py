"""`bagua chaos` finds nothing, and says when it finds something."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import Sandbox

KINDS = "kill-rank,cut-link,corrupt-link,kill-coordinator"


def test_chaos(sandbox: Sandbox) -> None:
    shape = ("--nnodes", "2", "--nproc-per-node", "1", "--seed", "5")  # the rank is killed last
    done = sandbox.bagua("chaos", "--minutes", "2", "--faults", "4", "--kinds", KINDS, *shape, "--output", "json")
    assert done.code == 0, done.text
    found = json.loads(done.out)
    assert sorted(one["kind"] for one in found["played"]) == sorted(KINDS.split(","))
    assert found["broken"] == {} and found["epochs"] > 0 and found["jobs"] == 1
    sandbox.assert_all_gone(within=20)


def test_bad_options(sandbox: Sandbox) -> None:
    done = sandbox.bagua("chaos", "--kinds", "kill-rank,fire")
    assert done.code == 2 and "There is no fault 'fire'" in done.err
    assert "SIGKILL of a rank" in sandbox.bagua("chaos", "--list").out
