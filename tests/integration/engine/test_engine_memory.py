"""Memory of the engine: what can't be had is refused with the figures, and what was given comes back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bagua.csrc import load

MIB = 1 << 20


@pytest.fixture
def members(make_world: Callable[..., Any]) -> Iterator[Callable[..., list[Any]]]:
    """``members(ranks, **engine_options)``: ranks of one host, in this process."""
    joined: list[Any] = []

    def make(ranks: int, **options: Any) -> list[Any]:
        world = make_world([list(range(ranks))], **options)
        joined.extend(
            load().Rank(data_socket=world.sockets[0], token=world.tokens[rank], rank=rank) for rank in range(ranks)
        )
        return joined

    yield make
    for rank in joined:
        rank.close()


def shared_mappings() -> int:
    """Mappings of shared memory in this process, where daemon and ranks are one."""
    with open("/proc/self/maps") as maps:
        return sum("/memfd:bagua" in line for line in maps)


def test_a_job_that_does_not_fit_is_refused_before_anything_is_made(members: Callable[..., list[Any]]) -> None:
    first, second = members(2, memory_limit=64 * MIB)
    with pytest.raises(load().CoreError) as refusal:
        first.require(40 * MIB)
    text = str(refusal.value)
    assert "this job needs 80 MiB of shared memory on this host (2 ranks, 40 MiB for rank 0)" in text
    assert "can get 64 MiB more, bounded by the limit of this engine, 64 MiB" in text
    assert "Run fewer ranks on this host" in text
    assert first.counters()["segment_bytes"] == 0
    first.require(32 * MIB)
    second.require(32 * MIB)


def test_an_allocation_that_does_not_fit_is_refused(members: Callable[..., list[Any]]) -> None:
    first, second = members(2, memory_limit=8 * MIB)
    held = first.alloc(6 * MIB)
    with pytest.raises(load().CoreError, match="rank 1 asks for 3 MiB of shared memory, but only 2 MiB are left"):
        second.alloc(3 * MIB)
    first.free(held.id)
    assert second.alloc(3 * MIB).nbytes == 3 * MIB  # what was given back can be had


def test_more_than_the_machine_has_is_refused(members: Callable[..., list[Any]]) -> None:
    (rank,) = members(1)
    for ask in (rank.alloc, rank.require):
        with pytest.raises(load().CoreError, match="bounded by"):
            ask(1 << 50)


def test_the_limit_of_address_space_counts(members: Callable[..., list[Any]]) -> None:
    resource = pytest.importorskip("resource")
    (rank,) = members(1)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 512 * MIB, hard))
    try:
        with pytest.raises(load().CoreError, match="limit of address space, ulimit -v"):
            rank.alloc(1024 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_memory_comes_back(members: Callable[..., list[Any]], wait_for: Callable[..., None]) -> None:
    (rank,) = members(1)
    joined = shared_mappings()
    segments = [rank.alloc(MIB) for _ in range(20)]
    assert rank.counters()["segment_bytes"] == 20 * MIB
    assert shared_mappings() >= joined + 20
    for segment in segments[:19]:
        rank.free(segment.id)
    assert rank.counters()["segment_bytes"] == MIB
    del segment
    segments.clear()
    wait_for(lambda: shared_mappings() <= joined + 1)  # the daemon's mapping of the last one
    rank.close()
    wait_for(lambda: shared_mappings() <= joined)


def test_stages_of_ordinary_tensors_stay_small(members: Callable[..., list[Any]]) -> None:
    torch = pytest.importorskip("torch")
    core = load()
    (rank,) = members(1)
    tensor = torch.ones(16 * MIB)
    for _ in range(3):
        call = (0, core.KINDS["allreduce"], core.DTYPES["float32"], core.OPS["SUM"], -1, tensor.numel())
        assert rank.transfer(*call, tensor.data_ptr(), 1, tensor.data_ptr(), 1, True, [], 0, 0, timeout_s=60.0) is None
        assert 0 < rank.counters()["segment_bytes"] <= 8 * MIB
