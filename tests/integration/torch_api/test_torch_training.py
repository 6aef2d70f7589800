"""Training of wrapped models equals training of one process on all ranks' batches.

All scenarios (training_scenarios/) run on the same ranks, one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import bagua.torch_api as bagua

sys.path.insert(0, str(Path(__file__).parent))

from training_scenarios import SCENARIOS


def rank_train(names: list[str]) -> None:
    """Says on standard output which scenarios went well."""
    bagua.init_process_group()
    for name in names:
        SCENARIOS[name]()
        bagua.barrier()
        print(f"passed {name}", flush=True)


LAYOUTS = {
    "2 ranks, small buckets": ([[0, 1]], "3000"),
    "4 ranks, one bucket": ([[0, 1, 2, 3]], None),
    "2 hosts, small buckets": ([[0], [1, 2]], "3000"),
    "1 rank": ([[0]], "3000"),
}


# The contract suite has 4 ranks on one host with large buckets, too.
FULL = {"4 ranks, one bucket"}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in LAYOUTS]
)
def outputs(request: Any, tmp_path_factory: Any, make_ranks: Any) -> list[str]:
    """What every rank wrote."""
    hosts, bucket_bytes = LAYOUTS[request.param]
    environment = {"BAGUA_DEFAULT_BUCKET_SIZE": bucket_bytes} if bucket_bytes else {}
    with make_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        started = ranks.start(rank_train, hosts=hosts, environment=environment, names=list(SCENARIOS))
        ranks.wait(deadline_s=500.0)  # for hangs alone: a loaded machine takes its time
        return [rank.output for rank in started]


@pytest.mark.parametrize("name", SCENARIOS)
def test_training(outputs: list[str], name: str) -> None:
    for rank, output in enumerate(outputs):
        assert f"passed {name}\n" in output, f"rank {rank}:\n{output}"
