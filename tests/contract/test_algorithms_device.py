"""Algorithms through the GPU leg without a GPU, on two hosts of two ranks: CPU tensors count as a device's, over fakes
of the CUDA runtime, NCCL and the kernels. With ``--full`` all cases on all routes; the rest of the suite runs there by
``pytest tests/contract/test_algorithms.py --device fake``.
"""

import os
import shutil

import pytest
from contract.algorithms import load_cases
from contract.algorithms.harness import Runner, check_reference
from contract.algorithms.subjects import registered_names
from rig.ranks.placing import ROUTES, environment

WORLD = "2 hosts x 2"
pytestmark = [
    pytest.mark.timeout(1600),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler for the fakes"),
]

# One of each kind of plan and of each thing that a rank computes itself.
OFTEN = {
    "staged": (
        "case gradient_allreduce",
        "case bytegrad everywhere",
        "case decentralized shift_one hosts",
        "case low_precision_decentralized",
        "case qadam",
        "case power_sgd",
        "case async minmax8",
        "case streaming_diloco int4",
    ),
    "flat": ("case gradient_allreduce", "case bytegrad", "case low_precision_decentralized"),
    "hierarchical": ("case gradient_allreduce", "case gradient_allreduce minmax8"),
}


def jobs(route):
    """Cases, and that every registered algorithm trains."""
    names = [f"case {name}" for name, case in load_cases().items() if WORLD in case.worlds]
    names += [f"check {name} trains" for name in registered_names()]
    return [
        pytest.param(route, name, marks=() if name in OFTEN[route] else pytest.mark.full, id=f"{route}-{name}")
        for name in names
    ]


@pytest.fixture(scope="module")
def runners(request, tmp_path_factory):
    """A runner for every route, which knows the jobs of all tests that were selected."""
    selected = {}
    for item in request.session.items:
        if item.fspath == request.path and "route" in getattr(item, "callspec").params:  # noqa: B009
            parameters = item.callspec.params
            selected.setdefault(parameters["route"], []).append(parameters["name"])
    return {
        route: Runner(WORLD, names, lambda: tmp_path_factory.mktemp("ranks"), environment("fake", route))
        for route, names in selected.items()
    }


# NCCL adds in an order of its own: sums of four differ from the reference's by rounding.
@pytest.mark.parametrize(("route", "name"), [one for route in ROUTES for one in jobs(route)])
def test_as_on_the_cpu(runners, route, name):
    """Step by step what one process of plain torch gets, on every rank."""
    found = runners[route].result(name)
    if name.startswith("case "):
        check_reference(name.removeprefix("case "), WORLD, found, loose=route != "staged")
