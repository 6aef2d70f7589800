"""Programs written for the original run unchanged: users' algorithms, tensor and bucket methods,
DistributedDataParallel.

All scenarios (compat_scenarios/) run on the same ranks, one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from rig.ranks.scenarios import check_passed, outputs_of, run_scenarios

sys.path.insert(0, str(Path(__file__).parent))

from compat_scenarios import SCENARIOS


def rank_scenarios(names: list[str]) -> None:
    run_scenarios(SCENARIOS, names)


LAYOUTS = {
    "4 ranks on 2 hosts, small buckets": ([[0, 1], [2, 3]], "300"),
    "3 ranks, one bucket": ([[0, 1, 2]], None),
    "1 rank": ([[0]], "300"),
}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if len(LAYOUTS[name][0]) == 2 else pytest.mark.full) for name in LAYOUTS],
)
def outputs(request: Any, tmp_path_factory: Any, make_ranks: Any) -> list[str]:
    """The output of every rank."""
    folder = tmp_path_factory.mktemp("ranks")
    return outputs_of(make_ranks, folder, LAYOUTS[request.param], rank_scenarios, list(SCENARIOS), deadline_s=200.0)


@pytest.mark.parametrize("name", SCENARIOS)
def test_compat(outputs: list[str], name: str) -> None:
    check_passed(outputs, name)
