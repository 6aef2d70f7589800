"""Programs that know nothing of Bagua give the same numbers on backend "bagua" as on Gloo.

All programs (unmodified/) run on the same ranks, one after the other, each on both backends.
"""

from __future__ import annotations

import faulthandler
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from rig import backends
from rig.scenarios import check_passed

sys.path.insert(0, str(Path(__file__).parent))

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")  # of parts that it uses itself
    from unmodified import ALL, PROGRAMS
    from unmodified.support import compare

import bagua.torch_api as bagua

DEADLINE_S = 600.0
pytestmark = pytest.mark.timeout(700)


def rank_programs(names: list[str], folder: str) -> None:
    """In a rank: says on standard output which went well."""
    faulthandler.enable()
    warnings.filterwarnings("ignore", module=r"torch\.")
    for name in names:
        compare(name, ALL[name], Path(folder), bagua.get_rank(), bagua.get_world_size())
        print(f"passed {name}", flush=True)


IN_PYTHON = ("DDP", "DDP with no_sync", "FSDP2", "collectives of objects")
"""Representatives of programs on the implementation in Python."""
COMBINED = [
    pytest.param(chosen, name, marks=() if chosen == "cpp" or name in IN_PYTHON else pytest.mark.full)
    for chosen in ("cpp", "python")
    for name in PROGRAMS
]


@pytest.fixture(scope="module")
def outputs(request: Any, tmp_path_factory: Any, make_ranks: Any) -> list[str]:
    """The output of every rank."""
    backends.need(request.param)
    folder = tmp_path_factory.mktemp("ranks")
    names = [name for name in PROGRAMS if selected(request, f"{request.param}-{name}")]
    with make_ranks(folder) as ranks:
        started = ranks.start(
            rank_programs, 2, environment={"BAGUA_C10D": request.param}, names=names, folder=str(folder)
        )
        ranks.wait(DEADLINE_S)
        return [f"{rank.output}\nIt ended with {rank.process.returncode}." for rank in started]


def selected(request: Any, name: str) -> bool:
    """Whether this run asks for it, as ``pytest -k`` may say."""
    return any(f"[{name}]" in item.name for item in request.session.items)


@pytest.mark.parametrize(("outputs", "name"), COMBINED, indirect=["outputs"])
def test_unmodified(outputs: list[str], name: str) -> None:
    check_passed(outputs, name)


@pytest.mark.full
@pytest.mark.parametrize("chosen", ["python", "cpp"])
def test_two_dimensions(tmp_path: Path, make_ranks: Any, chosen: str) -> None:
    """Four ranks: the loop like torchtitan's is sharded one way and tensor parallel the other way."""
    run_alone(tmp_path, make_ranks, chosen, 4, "like torchtitan")


@pytest.mark.full
@pytest.mark.parametrize("chosen", ["python", "cpp"])
def test_compiled(tmp_path: Path, make_ranks: Any, chosen: str) -> None:
    """torch.compile of a DDP model."""
    run_alone(tmp_path, make_ranks, chosen, 2, "torch.compile of DDP")


def run_alone(folder: Path, make_ranks: Any, chosen: str, nprocs: int, name: str) -> None:
    with make_ranks(folder) as ranks:
        environment = {"BAGUA_C10D": chosen}
        started = ranks.start(rank_programs, nprocs, environment=environment, names=[name], folder=str(folder))
        ranks.wait(DEADLINE_S)
        check_passed([f"{rank.output}\nIt ended with {rank.process.returncode}." for rank in started], name)
