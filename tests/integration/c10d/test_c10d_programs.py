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
from rig.ranks.scenarios import check_passed

sys.path.insert(0, str(Path(__file__).parent))

from unmodified import ABSENT, NAMES, programs

import bagua.torch_api as bagua

DEADLINE_S = 600.0
pytestmark = pytest.mark.timeout(700)


def rank_programs(names: list[str], folder: str) -> None:
    """In a rank: says on standard output which went well."""
    faulthandler.enable()
    warnings.filterwarnings("ignore", module=r"torch\.")  # as of deprecated parts that it uses itself
    from unmodified.support import compare

    found = programs()
    for name in names:
        compare(name, found[name], Path(folder), bagua.get_rank(), bagua.get_world_size())
        print(f"passed {name}", flush=True)


def outputs_of(chosen: str, request: Any, make_ranks: Any, folder: Path) -> list[str]:
    """The output of every rank. They run the programs that tests of the fixture's name ask for, as ``pytest -k`` may
    say."""
    backends.need(chosen)
    test = request.fixturename.replace("outputs", "test")
    wanted = {item.name for item in request.session.items}
    names = [name for name in NAMES if f"{test}[{name}]" in wanted and name not in ABSENT]
    with make_ranks(folder) as ranks:
        started = ranks.start(rank_programs, 2, environment={"BAGUA_C10D": chosen}, names=names, folder=str(folder))
        ranks.wait(DEADLINE_S)
        return [f"{rank.output}\nIt ended with {rank.process.returncode}." for rank in started]


@pytest.fixture(scope="module")
def outputs_in_cpp(request: Any, make_ranks: Any, tmp_path_factory: Any) -> list[str]:
    return outputs_of("cpp", request, make_ranks, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def outputs_in_python(request: Any, make_ranks: Any, tmp_path_factory: Any) -> list[str]:
    return outputs_of("python", request, make_ranks, tmp_path_factory.mktemp("ranks"))


def parameter(name: str, *marks: pytest.MarkDecorator) -> Any:
    absent = [pytest.mark.skip(reason=ABSENT[name])] if name in ABSENT else []
    return pytest.param(name, marks=[*marks, *absent])


@pytest.mark.parametrize("name", [parameter(name) for name in NAMES])
def test_in_cpp(outputs_in_cpp: list[str], name: str) -> None:
    check_passed(outputs_in_cpp, name)


REPRESENTATIVES = ("DDP", "DDP with no_sync", "FSDP2", "collectives of objects")


@pytest.mark.parametrize(
    "name", [parameter(name, *([] if name in REPRESENTATIVES else [pytest.mark.full])) for name in NAMES]
)
def test_in_python(outputs_in_python: list[str], name: str) -> None:
    check_passed(outputs_in_python, name)


@pytest.mark.full
@pytest.mark.skipif("like torchtitan" in ABSENT, reason=ABSENT.get("like torchtitan", ""))
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
