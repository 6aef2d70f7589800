"""Algorithms when ranks join, through the GPU leg without a GPU: CPU tensors count as a device's, over the fakes. Those
whose residuals are the engine's are left out, which begin at zero in each generation on a GPU. So are those that begin
anew with one rank's weights. ``--device cuda`` takes a GPU."""

import os
import shutil

import pytest
from contract.test_algorithms_joins import ANEW, BECOMES, CASES, check, train
from rig.ranks.placing import environment

WORLD = "2 hosts x 1, then 1 and 2"
FEEDBACK = ("onebit", "topk", "int4")
NAMES = [
    name
    for name, case in CASES.items()
    if BECOMES[WORLD] in case.worlds and name not in ANEW and not any(codec in name for codec in FEEDBACK)
]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(1000),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the fakes"),
]


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    device = "cuda" if request.config.getoption("--device") == "cuda" else "fake"
    return train(tmp_path_factory.mktemp("joins"), WORLD, NAMES, environment(device, "staged"))


@pytest.mark.parametrize("name", NAMES)
def test_ranks_join(trained, name):
    check(trained, WORLD, name)
