"""The GPU leg over fakes of CUDA and NCCL: results, order of streams, resources, choice of routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ONE_HOST, TWO_HOSTS = [[0, 1, 2]], [[0, 1], [2, 3]]
LAYOUTS = [("staged", ONE_HOST), ("staged", [[0, 1], [2]]), ("flat", ONE_HOST), ("hierarchical", TWO_HOSTS)]


def nothing_left(left: dict[str, int]) -> None:
    """Only the test's own stream, and no communicator of NCCL."""
    for name in ("allocated", "registered", "communicators"):
        assert left[name] == 0, (name, left)
    assert left["streams"] == 1, left
    assert left["events"] <= 200, left  # they go with the leg


@pytest.mark.parametrize(("route", "hosts"), LAYOUTS)
def test_kinds(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    """All kinds, dtypes and reductions give what numpy gives, without a wait of the host."""
    for result in make_job(hosts).run("kinds", route=route, counts=[1000, 3, 1]).values():
        found = result["result"]
        assert found["route"] == route
        assert found[f"ops_{route}"] > 0
        assert found["in_flight"] <= 4
        nothing_left(found["left"] | {"registered": 0})


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2]])
def test_bfloat16(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    assert all(result["result"] for result in make_job(hosts).run("bf16_sum", route=route).values())


@pytest.mark.parametrize("codec", ["fp16", "minmax8", "onebit", "topk"])
@pytest.mark.parametrize(("route", "hosts"), [("flat", [[0], [1], [2]]), ("hierarchical", TWO_HOSTS)])
def test_encoded(make_job: Callable[..., Any], codec: str, route: str, hosts: list[list[int]]) -> None:
    """Replicas have the same bits; error feedback keeps the sum of steps near the truth; exact elements are exact."""
    results = make_job(hosts).run("encoded", route=route, codec=codec, steps=6, count=50_000)
    first = results[0]["result"]
    for result in results.values():
        found = result["result"]
        assert found["digests"] == first["digests"]
        assert found["exact"]
        assert found["route"][route] == 6
        assert found["error"] < {"fp16": 1e-4, "minmax8": 2e-3, "onebit": 0.35, "topk": 0.35}[codec]


def test_encoded_without_kernels(make_job: Callable[..., Any]) -> None:
    """The daemons encode instead."""
    job = make_job([[0], [1]])
    results = job.run("encoded", {"BAGUA_DEVICE_KERNELS": ""}, route="flat", codec="minmax8", steps=2, count=5000)
    assert all(result["result"]["route"]["staged"] == 2 for result in results.values())


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]])
def test_order_of_streams(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    world = sum(len(there) for there in hosts)
    for result in make_job(hosts).run("order", route=route).values():
        found = result["result"]
        total = world * (world + 1) / 2 * world**2
        assert found == {"result": [total, True], "early": False, "done": True, "times": True}


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]])
def test_steps_make_nothing_new(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    for result in make_job(hosts).run("many", route=route, steps=40, buckets=4).values():
        assert result["result"]["right"]
        # A lane gives memory back shortly after a result is there: a step may find those of the one before in use.
        assert result["result"]["made"][-1][0] <= 2 * 4 + 2, result["result"]["made"]


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]])
def test_communicators_leave_nothing(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    for result in make_job(hosts).run("communicators", route=route, rounds=6).values():
        left = result["result"]["left"]
        for name in ("streams", "allocated", "communicators", "registered"):
            assert left[-1][name] <= left[1][name], (name, left)
        assert left[-1]["threads"] <= left[1]["threads"] + 2, left


def test_wrong_calls_are_refused(make_job: Callable[..., Any]) -> None:
    for result in make_job([[0, 1]]).run("refused").values():
        said = result["result"]
        assert all(said), said
        assert "captured" in said[-1]
        assert "communicator 5 does not exist" in said[2]


CHOICES: list[tuple[list[list[int]], dict[str, str], set[str]]] = [
    ([[0, 1]], {}, {"flat"}),
    ([[0, 1]], {"FAKE_CUDA_BUS_ID": "0000:01:00.0"}, {"staged"}),
    ([[0, 1]], {"BAGUA_DEVICE_NCCL": ""}, {"staged"}),
    ([[0, 1]], {"BAGUA_DEVICE_ROUTE": "staged"}, {"staged"}),
    ([[0, 1]], {"BAGUA_DEVICE_ROUTE": "flat", "BAGUA_DEVICE_DRIVER": ""}, {"flat"}),
    ([[0, 1]], {"FAKE_NCCL_NO_INIT": "1"}, {"staged"}),
    ([[0, 1], [2, 3]], {}, {"staged", "flat", "hierarchical"}),
]


@pytest.mark.parametrize(("hosts", "environment", "expected"), CHOICES)
def test_choice_of_route(
    make_job: Callable[..., Any], hosts: list[list[int]], environment: dict[str, str], expected: set[str]
) -> None:
    """All ranks choose the same; several ranks on one GPU, or none with NCCL, go through the daemon."""
    results = make_job(hosts).run("routes", environment)
    chosen = {result["result"]["route"] for result in results.values()}
    assert len(chosen) == 1
    assert chosen <= expected


def test_no_cuda_is_said(make_job: Callable[..., Any], libraries: Any) -> None:
    job = make_job([[0]])
    job.start("routes", {"BAGUA_DEVICE_DRIVER": "", "BAGUA_DEVICE_NCCL": ""})
    assert "no way for tensors of GPUs" in job.line(0)["raised"]
