"""Training of wrapped models equals training of one process on all ranks' batches.

All scenarios (training_scenarios/) run on the same ranks, one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rig.ranks.scenarios import check_passed, outputs_of, run_scenarios

sys.path.insert(0, str(Path(__file__).parent))

from training_scenarios import SCENARIOS


def rank_train(names: list[str]) -> None:
    run_scenarios(SCENARIOS, names)


LAYOUTS = {
    "2 ranks, small buckets": ([[0, 1]], "3000"),
    "4 ranks, one bucket": ([[0, 1, 2, 3]], None),
    "2 hosts, small buckets": ([[0], [1, 2]], "3000"),
    "1 rank": ([[0]], "3000"),
}


# The contract suite has 4 ranks on one host with large buckets, too; two hosts have small buckets inside and between.
FULL = {"1 rank", "2 ranks, small buckets", "4 ranks, one bucket"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in LAYOUTS]
)
def outputs(request: Any, tmp_path_factory: Any, make_ranks: Any) -> list[str]:
    """The output of every rank."""
    folder = tmp_path_factory.mktemp("ranks")
    return outputs_of(make_ranks, folder, LAYOUTS[request.param], rank_train, list(SCENARIOS), deadline_s=500.0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_training(outputs: list[str], name: str) -> None:
    check_passed(outputs, name)
