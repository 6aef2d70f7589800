"""Algorithms when ranks are killed, and join, through the GPU leg without a GPU: CPU tensors count as a device's, over
the fakes. As ``test_algorithms_losses.py`` and ``test_algorithms_joins.py``, but residuals of the engine begin at zero
in each generation on a GPU. ``--device cuda`` takes a GPU."""

import os
import shutil

import pytest
from contract import test_algorithms_joins as joins
from contract import test_algorithms_losses as losses
from rig.ranks.placing import environment

pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the fakes"),
]
OFTEN = {"gradient_allreduce onebit"}
WORLD = "2 hosts x 1, then 1 and 2"
FEEDBACK = ("onebit", "topk", "int4", "int2")
JOINING = [
    name
    for name, case in joins.CASES.items()
    if joins.CHANGES[WORLD].then in case.worlds
    and name not in joins.ANEW  # with one rank's weights
    and not any(codec in name for codec in FEEDBACK)
]


@pytest.fixture(scope="module")
def variables(request):
    return environment("cuda" if request.config.getoption("--device") == "cuda" else "fake", "staged")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in losses.EXACT]
)
def test_a_repeated_step_gives_the_same_bits(variables, tmp_path, name):
    jobs = {"cut": losses.MID_STEP, "uncut": dict.fromkeys(losses.KILLS, "between")}
    for folder in jobs:
        (tmp_path / folder).mkdir()
    cut, uncut = [losses.train(tmp_path / folder, [name], phases, variables) for folder, phases in jobs.items()]
    losses.check_same_bits(cut, uncut, name)


@pytest.mark.full
@pytest.mark.parametrize("name", losses.ASYNCHRONOUS)
def test_others_begin_anew(variables, tmp_path, name):
    losses.check_near(losses.train(tmp_path, [name], losses.MID_STEP, variables), name)


@pytest.fixture(scope="module")
def trained(variables, tmp_path_factory):
    return joins.train(tmp_path_factory.mktemp("joins"), WORLD, JOINING, variables)


@pytest.mark.full
@pytest.mark.parametrize("name", JOINING)
def test_ranks_join(trained, name):
    joins.check(trained, WORLD, name)
