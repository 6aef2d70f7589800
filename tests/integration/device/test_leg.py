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
    for result in make_job(hosts).run("results.kinds", route=route, counts=[1000, 3, 1]).values():
        found = result["result"]
        assert found["route"] == route
        assert found[f"ops_{route}"] > 0
        assert found["in_flight"] <= 4
        nothing_left(found["left"] | {"registered": 0})


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2]])
def test_bfloat16(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    assert all(result["result"] for result in make_job(hosts).run("results.bf16_sum", route=route).values())


@pytest.mark.parametrize("codec", ["fp16", "minmax8", "onebit", "topk"])
@pytest.mark.parametrize(("route", "hosts"), [("flat", [[0], [1], [2]]), ("hierarchical", TWO_HOSTS)])
def test_encoded(make_job: Callable[..., Any], codec: str, route: str, hosts: list[list[int]]) -> None:
    """Replicas have the same bits; error feedback keeps the sum of steps near the truth; exact elements are exact."""
    results = make_job(hosts).run("results.encoded", route=route, codec=codec, steps=6, count=50_000)
    first = results[0]["result"]
    for result in results.values():
        found = result["result"]
        assert found["digests"] == first["digests"]
        assert found["exact"]
        assert found["route"][route] == 6
        assert found["error"] < {"fp16": 1e-4, "minmax8": 2e-3, "onebit": 0.35, "topk": 0.35}[codec]


# 209: cudaErrorNoKernelImageForDevice
@pytest.mark.parametrize(
    ("missing", "why"), [({"BAGUA_DEVICE_KERNELS": ""}, ""), ({"FAKE_KERNELS_LOAD": "209"}, "can't run on GPU")]
)
def test_encoded_without_kernels(make_job: Callable[..., Any], missing: dict[str, str], why: str) -> None:
    """The daemons encode instead, for all ranks, if one has no kernels, or a GPU that is too old for them."""
    job = make_job([[0], [1]])
    job.of_rank = {1: missing}
    results = job.run("results.encoded", route="flat", codec="minmax8", steps=2, count=5000)
    assert all(result["result"]["route"]["staged"] == 2 for result in results.values())
    assert why in results[1]["result"]["missing"]["kernels"]
    assert "kernels" not in results[0]["result"]["missing"]


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]])
def test_order_of_streams(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    world = sum(len(there) for there in hosts)
    for result in make_job(hosts).run("streams.order", route=route).values():
        found = result["result"]
        total = world * (world + 1) / 2 * world**2
        assert found == {"result": [total, True], "early": False, "done": True, "times": True}


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]])
def test_steps_make_nothing_new(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    for result in make_job(hosts).run("streams.many", route=route, steps=40, buckets=4).values():
        assert result["result"]["right"]
        # A staged route gives memory back shortly after its result: a step may find that of the previous one in use.
        assert result["result"]["made"][-1][0] <= 2 * 4 + 2, result["result"]["made"]


@pytest.mark.parametrize(("route", "most"), [("flat", 17), ("staged", 22)])
def test_few_calls_for_a_bucket(make_job: Callable[..., Any], route: str, most: int) -> None:
    """CUDA takes most of the host's time for a bucket: a call more is noticed here. (NCCL's own are not seen.)"""
    for result in make_job([[0, 1]]).run("streams.calls", route=route).values():
        assert 0 < result["result"]["calls"] <= most
        assert result["result"]["events"] == 0


def test_groups_that_take_a_moment(make_job: Callable[..., Any]) -> None:
    """A submitting thread waits hardly longer than NCCL takes to enqueue a group on a thread of its own: it polls more
    often than every millisecond."""
    for result in make_job([[0, 1]]).run("streams.quick_groups", {"BAGUA_NCCL_BLOCKING": "0"}).values():
        assert result["result"] > 10


@pytest.mark.parametrize(("route", "hosts"), [LAYOUTS[0], LAYOUTS[2], LAYOUTS[3]])
def test_communicators_leave_nothing(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    for result in make_job(hosts).run("routes.communicators", route=route, rounds=6).values():
        left = result["result"]["left"]
        for name in ("streams", "allocated", "communicators", "registered"):
            assert left[-1][name] <= left[1][name], (name, left)
        assert result["result"]["threads"] <= left[0]["threads"], "each round adds a thread"


def test_wrong_calls_are_refused(make_job: Callable[..., Any]) -> None:
    for result in make_job([[0, 1]]).run("routes.refused").values():
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
    results = make_job(hosts).run("routes.routes", environment)
    chosen = {result["result"]["route"] for result in results.values()}
    assert len(chosen) == 1
    assert chosen <= expected


FAILURES: list[tuple[dict[int, dict[str, str]], str, str]] = [
    ({1: {"FAKE_NCCL_NO_INIT": "1"}}, "rank 1: NCCL: making a communicator", "no network that this fake likes"),
    ({2: {"FAKE_NCCL_NO_INIT": "late"}}, "rank 2: NCCL: making a communicator", "no network that this fake likes"),
    ({0: {"FAKE_NCCL_NO_ID": "1"}}, "rank 0: NCCL: making an id", "unhandled system error"),
]


@pytest.mark.parametrize(("of_rank", "who", "words"), FAILURES)
def test_a_route_that_cannot_be_set_up(
    make_job: Callable[..., Any], of_rank: dict[int, dict[str, str]], who: str, words: str
) -> None:
    """Another one is taken, and all members know whose fault it was and what NCCL said; forced, it is an error at all
    members, also at those that wait in NCCL for the one that failed."""
    job = make_job(ONE_HOST)
    job.of_rank = of_rank
    for result in job.run("routes.report").values():
        found = result["result"]
        assert found["route"] == "staged" and list(found["failed"]) == ["flat"]
        assert list(found["impossible"]) == ["hierarchical"]  # one host
        assert who in found["failed"]["flat"] and words in found["failed"]["flat"]
        assert found["left"]["communicators"] == 0
    job = make_job(ONE_HOST)
    job.of_rank = of_rank
    job.start("routes.report", {"BAGUA_DEVICE_ROUTE": "flat"})
    for result in job.lines().values():
        said = result["raised"]
        assert "route flat (BAGUA_DEVICE_ROUTE) can't be had for all ranks" in said and who in said and words in said


NO_ROUTES: list[tuple[str, list[list[int]], dict[int, dict[str, str]], str]] = [
    ("flat", [[0, 1]], {1: {"BAGUA_DEVICE_NCCL": ""}}, "rank 1: no NCCL: BAGUA_DEVICE_NCCL is empty"),
    ("flat", [[0, 1]], {1: {"FAKE_NCCL_VERSION": "22005"}}, "rank 0 has NCCL 22907, rank 1 has 22005"),
    ("flat", [[0, 1]], {rank: {"FAKE_CUDA_BUS_ID": "0000:01:00.0"} for rank in (0, 1)}, "invalid usage"),
    ("staged", [[0, 1]], {0: {"BAGUA_DEVICE_DRIVER": ""}}, "rank 0: no waits on memory: BAGUA_DEVICE_DRIVER is empty"),
    ("hierarchical", [[0, 1]], {}, "not the same number, 2 or more, on each of several hosts"),
    ("hierarchical", [[0, 1], [2]], {}, "not the same number, 2 or more, on each of several hosts"),
]


@pytest.mark.parametrize(("route", "hosts", "of_rank", "why"), NO_ROUTES)
def test_a_forced_route_that_is_not_possible(
    make_job: Callable[..., Any], route: str, hosts: list[list[int]], of_rank: dict[int, dict[str, str]], why: str
) -> None:
    """The same clear error at all members."""
    job = make_job(hosts)
    job.of_rank = of_rank
    job.start("routes.report", {"BAGUA_DEVICE_ROUTE": route})
    said = {result["raised"].splitlines()[-1] for result in job.lines().values()}
    assert len(said) == 1, said
    [message] = said
    assert f"route {route} (BAGUA_DEVICE_ROUTE) can't be had" in message and why in message, message


def test_some_of_the_ranks_have_no_such_route(make_job: Callable[..., Any]) -> None:
    """A communicator whose shape has no meaning for the forced route chooses for itself, and says so."""
    for rank, result in make_job(TWO_HOSTS).run("routes.report", route="hierarchical", members=[0, 1]).items():
        found = result["result"]
        assert found["route"] == ("flat" if rank < 2 else "hierarchical")
        assert ("hierarchical" in found["impossible"]) == (rank < 2)


def test_what_has_no_way_is_refused(make_job: Callable[..., Any]) -> None:
    for result in make_job([[0, 1]]).run("routes.no_way", {"BAGUA_DEVICE_DRIVER": ""}, route="flat").values():
        assert "send" in result["result"] and "BAGUA_DEVICE_DRIVER is empty" in result["result"]


def test_streams_that_share_queues(make_job: Callable[..., Any]) -> None:
    """CUDA may put streams of one priority on one queue: a stream that waits for other ranks must not hold up what they
    wait for."""
    results = make_job([[0, 1]]).run("streams.crossed", {"FAKE_CUDA_ONE_QUEUE": "1"})
    assert all(result["result"] for result in results.values())


def test_more_operations_than_the_daemon_has_room_for(make_job: Callable[..., Any]) -> None:
    """They leave as others come back, in their order."""
    job = make_job([[0, 1]])
    job.start("streams.beyond_slots", count=1100)
    for rank in job.lines():
        job.go_on(rank)
    for result in job.lines().values():
        assert result == {"result": True, "misuse": []}


def test_a_communicator_is_made_while_a_stream_waits(make_job: Callable[..., Any]) -> None:
    results = make_job([[0], [1]]).run("routes.made_while_another_waits")
    assert all(result["result"] for result in results.values())


def test_another_device_than_the_current_one(make_job: Callable[..., Any]) -> None:
    for result in make_job([[0, 1]]).run("streams.on_another_device").values():
        assert result["result"] == {"result": [3.0, True], "device": 0}


def test_two_devices_of_a_rank(make_job: Callable[..., Any]) -> None:
    assert all(result["result"] for result in make_job([[0, 1]]).run("streams.two_devices").values())


@pytest.mark.parametrize("route", ["staged", "flat"])
def test_captures_elsewhere_are_not_spoilt(make_job: Callable[..., Any], route: str) -> None:
    make_job([[0, 1]]).run("streams.during_a_capture", route=route)


def test_a_forked_child_is_refused(make_job: Callable[..., Any]) -> None:
    for result in make_job([[0, 1]]).run("endings.forked", route="staged").values():
        assert "forked child" in result["result"]["said"]
        assert result["result"]["status"] == 0


def test_no_cuda_is_said(make_job: Callable[..., Any], libraries: Any) -> None:
    job = make_job([[0]])
    job.start("routes.routes", {"BAGUA_DEVICE_DRIVER": "", "BAGUA_DEVICE_NCCL": ""})
    assert "no way for tensors of GPUs" in job.line(0)["raised"]
