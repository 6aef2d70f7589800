"""Programs that know nothing of Bagua give the same numbers on backend "bagua" as on Gloo.

All programs (unmodified/) run on the same ranks, one after the other, each on both backends.
"""

import faulthandler
import sys
import warnings
from pathlib import Path

import pytest
from rig.ranks.scenarios import check_passed

sys.path.insert(0, str(Path(__file__).parent))

from unmodified import ABSENT, NAMES, programs

import bagua.torch_api as bagua

DEADLINE_S = 600.0
pytestmark = pytest.mark.timeout(700)


def rank_programs(names, folder):
    """In a rank: says on standard output which went well."""
    faulthandler.enable()
    warnings.filterwarnings("ignore", module=r"torch\.")  # as of deprecated parts that it uses itself
    from unmodified.support import compare

    found = programs()
    for name in names:
        compare(name, found[name], Path(folder), bagua.get_rank(), bagua.get_world_size())
        print(f"passed {name}", flush=True)


def run(folder, make_ranks, nprocs, names):
    """The output of every rank."""
    with make_ranks(folder) as ranks:
        started = ranks.start(rank_programs, nprocs, names=names, folder=str(folder))
        ranks.wait(DEADLINE_S)
        return [f"{rank.output}\nIt ended with {rank.process.returncode}." for rank in started]


@pytest.fixture(scope="module")
def outputs(request, make_ranks, tmp_path_factory):
    """They run the programs that tests ask for, as ``pytest -k`` may say."""
    wanted = {item.name for item in request.session.items}
    names = [name for name in NAMES if f"test_programs[{name}]" in wanted and name not in ABSENT]
    return run(tmp_path_factory.mktemp("ranks"), make_ranks, 2, names)


def parameter(name):
    return pytest.param(name, marks=[pytest.mark.skip(reason=ABSENT[name])] if name in ABSENT else [])


@pytest.mark.parametrize("name", [parameter(name) for name in NAMES])
def test_programs(outputs, name):
    check_passed(outputs, name)


@pytest.mark.full
@pytest.mark.skipif("like torchtitan" in ABSENT, reason=ABSENT.get("like torchtitan", ""))
def test_two_dimensions(tmp_path, make_ranks):
    """Four ranks: the loop like torchtitan's is sharded one way and tensor parallel the other way."""
    check_passed(run(tmp_path, make_ranks, 4, ["like torchtitan"]), "like torchtitan")
