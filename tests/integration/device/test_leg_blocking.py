"""NCCL's communicators block: they are children of those that don't. And where there can be none, or
BAGUA_NCCL_BLOCKING=0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

NOT_BLOCKING = {"BAGUA_NCCL_BLOCKING": "0"}
ONE_HOST, TWO_HOSTS = [[0, 1, 2]], [[0, 1], [2, 3]]
LAYOUTS = [("flat", ONE_HOST), ("hierarchical", TWO_HOSTS)]


@pytest.mark.parametrize(("route", "hosts"), LAYOUTS)
def test_kinds(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    """Results are right, all of NCCL's operations block, and parents and children are given back."""
    for result in make_job(hosts).run("results.kinds", route=route, counts=[1000, 3]).values():
        found = result["result"]
        assert found[f"ops_{route}"] > 0
        assert found["blocking_groups"] > 0
        assert found["nccl_operations"] == found["nccl_blocking"] > 0
        assert found["left"]["communicators"] == found["left"]["allocated"] == 0


@pytest.mark.parametrize("variables", [NOT_BLOCKING, {"FAKE_NCCL_VERSION": "21705"}])
def test_without_children(make_job: Callable[..., Any], variables: dict[str, str]) -> None:
    """Nothing blocks if that is not wanted, nor where NCCL is too old for it: no reason is given for either."""
    for result in make_job(ONE_HOST).run("routes.report", variables, route="flat").values():
        found = result["result"]
        assert found["route"] == "flat" and found["undivided"] == "" and found["failed"] == {}
        assert found["nccl_blocking"] == 0


@pytest.mark.parametrize("fails", ["1", "late"])
def test_a_child_that_cannot_be_made(make_job: Callable[..., Any], fails: str) -> None:
    """All members go on with communicators that don't block, also those that waited for the one that failed; all know
    its reason."""
    job = make_job(ONE_HOST)
    job.of_rank = {1: {"FAKE_NCCL_NO_SPLIT": fails}}
    for result in job.run("routes.report", route="flat").values():
        found = result["result"]
        assert found["route"] == "flat" and found["failed"] == {}
        assert "rank 1: NCCL: " in found["undivided"] and "unhandled system error" in found["undivided"]
        assert found["nccl_blocking"] == 0
        assert found["left"]["communicators"] == 0


def test_one_rank_that_does_not_want_it(make_job: Callable[..., Any]) -> None:
    """One is enough."""
    job = make_job(ONE_HOST)
    job.of_rank = {1: NOT_BLOCKING}
    for result in job.run("routes.report", route="flat").values():
        assert result["result"]["nccl_blocking"] == 0


@pytest.mark.parametrize(("route", "hosts"), LAYOUTS)
def test_a_killed_rank_frees_the_others(make_job: Callable[..., Any], route: str, hosts: list[list[int]]) -> None:
    """Kernels of a child that wait for it are ended."""
    job = make_job(hosts)
    job.start("endings.lost", route=route, hang=False)
    job.lines()
    victim = max(job.tokens)
    job.kill(victim)
    for rank in job.tokens:
        if rank == victim:
            continue
        job.go_on(rank)
        result = job.line(rank)
        assert "raised" not in result and result["misuse"] == [], result
        found = result["result"]
        assert f"rank {victim} " in found["said"] and f"rank {victim} " in found["later"] and found["done"]
        assert found["aborts"] > 0 and found["left"]["communicators"] == 0 and found["left"]["streams"] == 1


def test_an_abort_ends_a_call_that_nccl_blocks(make_job: Callable[..., Any]) -> None:
    """The first operation makes connections, and blocks its caller until all have come: one lives, and never does. Only
    an abort ends that call. Meanwhile the leg knows that the caller waits."""
    job = make_job(ONE_HOST)
    job.start("endings.ended_in_a_call", {"FAKE_NCCL_CONNECTS": "1"}, route="flat")
    job.lines()
    job.engines[0].abort("the generation ends")
    for rank in job.tokens:
        job.go_on(rank)
        result = job.line(rank)
        assert "raised" not in result and result["misuse"] == [], result
        found = result["result"]
        assert found["aborts"] == 2 and found["left"]["communicators"] == 0
        if rank != max(job.tokens):
            assert "NCCL connects with other ranks, for a reduction." in found["what"]
            assert "the generation ends" in found["said"]
