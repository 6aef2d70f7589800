"""Programs written for the original run unchanged: users' algorithms, tensor and bucket methods,
DistributedDataParallel.

All scenarios (compat_scenarios/) run on the same ranks, one after the other.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import bagua.torch_api as bagua

sys.path.insert(0, str(Path(__file__).parent))

from compat_scenarios import SCENARIOS


def rank_scenarios(names: list[str]) -> None:
    """Says on standard output which scenarios went well."""
    bagua.init_process_group()
    for name in names:
        SCENARIOS[name]()
        bagua.barrier()
        print(f"passed {name}", flush=True)


LAYOUTS = {
    "4 ranks on 2 hosts, small buckets": ([[0, 1], [2, 3]], "300"),
    "3 ranks, one bucket": ([[0, 1, 2]], None),
    "1 rank": ([[0]], "300"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def outputs(request: Any, tmp_path_factory: Any, make_ranks: Any) -> list[str]:
    """What every rank wrote."""
    hosts, bucket_bytes = LAYOUTS[request.param]
    environment = {"BAGUA_DEFAULT_BUCKET_SIZE": bucket_bytes} if bucket_bytes else {}
    with make_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        started = ranks.start(rank_scenarios, hosts=hosts, environment=environment, names=list(SCENARIOS))
        ranks.wait(deadline_s=200.0)  # for hangs alone: a loaded machine takes its time
        return [rank.output for rank in started]


@pytest.mark.parametrize("name", SCENARIOS)
def test_compat(outputs: list[str], name: str) -> None:
    for rank, output in enumerate(outputs):
        assert f"passed {name}\n" in output, f"rank {rank}:\n{output}"
