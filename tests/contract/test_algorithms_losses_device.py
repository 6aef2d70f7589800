"""Algorithms when ranks are killed, through the GPU leg without a GPU: CPU tensors count as a device's, over the fakes.
As ``test_algorithms_losses.py``, but residuals of the engine begin at zero in each generation, in both jobs.
``--device cuda`` takes a GPU."""

import os
import shutil

import pytest
import torch
from contract.test_algorithms_losses import ASYNCHRONOUS, EXACT, KILLS, train
from rig.ranks.placing import environment

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the fakes"),
]
OFTEN = {"gradient_allreduce onebit"}
MID_STEP = {member: phase for member, (_, phase) in KILLS.items()}


def device_of(request):
    return environment("cuda" if request.config.getoption("--device") == "cuda" else "fake", "staged")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.full) for name in EXACT]
)
def test_a_repeated_step_gives_the_same_bits(request, tmp_path, name):
    variables = device_of(request)
    jobs = {"cut": MID_STEP, "uncut": dict.fromkeys(KILLS, "between")}
    for folder in jobs:
        (tmp_path / folder).mkdir()
    cut, uncut = [train(tmp_path / folder, [name], phases, variables) for folder, phases in jobs.items()]
    for mine, wanted in zip(cut, uncut, strict=True):
        equal = [torch.equal(one, other) for one, other in zip(mine[name], wanted[name], strict=True)]
        assert all(equal), equal


@pytest.mark.full
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_others_begin_anew(request, tmp_path, name):
    found = train(tmp_path, [name], MID_STEP, device_of(request))
    for one in found:
        assert all(bool(parameters.isfinite().all()) for parameters in one[name])
    assert (found[0][name][-1] - found[1][name][-1]).abs().max() < 0.5
