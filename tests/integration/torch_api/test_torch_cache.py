"""The cache of samples with several processes: ranks, workers of loaders, writers that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.engine_hosts import Ranks
from torch.utils.data import DataLoader

import bagua.torch_api as bagua
from bagua.torch_api.cache.host_store import HostStore
from bagua.torch_api.contrib import CachedDataset, CacheLoader

FORK = multiprocessing.get_context("fork")
LENGTH = 60


class Recorded:
    """A dataset that notes each load in a file."""

    def __init__(self, record: Path) -> None:
        self.record = record

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        with self.record.open("a") as file:
            file.write(f"{index}\n")
        return torch.full((100,), float(index))


def rank_read(folder: str) -> tuple[float, list[int]]:
    """Each rank reads its half, then all of it."""
    bagua.init_process_group()
    rank = bagua.get_rank()
    record, cache = Path(folder, "record"), Path(folder, "cache")
    cached = CachedDataset(Recorded(record), folder=cache, writer_buffer_size=1, secret=b"s" * 32)
    for index in range(rank, LENGTH, 2):
        cached[index]
    bagua.barrier()
    total = sum(float(cached[index].sum()) for index in range(LENGTH))
    found = cached.cache_loader.statistics()
    return total, [found.hits, found.misses, found.failures]


def test_ranks_share_a_cache(ranks: Ranks, tmp_path: Path) -> None:
    started = ranks.run(rank_read, 2, folder=str(tmp_path))
    for total, counts in started:
        assert total == 100 * sum(range(LENGTH)) and counts == [LENGTH, LENGTH // 2, 0]
    assert len((tmp_path / "record").read_text().split()) == LENGTH


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_loader_fill_it(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Each writes the rest of its buffer when it ends. Counts are those of all of them."""
    if start == "spawn" and not request.config.getoption("--full"):
        pytest.skip("each spawned worker imports torch: --full")
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # spawned workers import this file
    monkeypatch.setenv("BAGUA_CACHE_DIR", str(tmp_path))
    cached = CachedDataset(Recorded(tmp_path / "record"), writer_buffer_size=7)
    loader: Any = DataLoader(cached, 4, num_workers=2, multiprocessing_context=start)
    for _ in range(2):
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(LENGTH))
    assert len((tmp_path / "record").read_text().split()) == LENGTH
    found = cached.cache_loader.statistics()
    assert (found.hits, found.misses, found.damaged) == (LENGTH, LENGTH, 0)
    assert cached.cache_loader.num_keys() == LENGTH


def write_for_ever(folder: Path, number: int, begun: Any) -> None:
    """Writes and reads until it is killed."""
    cache = CacheLoader(folder=folder, capacity=400_000, writer_buffer_size=3)
    step = 0
    while True:
        key = (step * 7 + number) % 97
        assert cache.get(key, lambda key: bytes([key]) * 9_000) == bytes([key]) * 9_000
        step += 1
        if step == 20:
            begun.release()


def test_writers_that_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at any moment leaves a cache that is whole, bounded and can be used at once."""
    monkeypatch.setenv("BAGUA_CACHE_DIR", str(tmp_path))
    begun = FORK.Semaphore(0)
    folder = tmp_path / "shared"
    writers = []
    for number in range(9):
        writers.append(FORK.Process(target=write_for_ever, args=(folder, number, begun)))
        writers[-1].start()
        assert begun.acquire(timeout=60.0)
        if len(writers) >= 3:
            killed = writers.pop(0)
            assert killed.pid is not None
            os.kill(killed.pid, signal.SIGKILL)
            killed.join()
            assert killed.exitcode == -signal.SIGKILL
    for writer in writers:
        assert writer.is_alive(), "no writer ever failed"
        writer.kill()
        writer.join()
    store = HostStore(folder, capacity=400_000)
    cache = CacheLoader(store)
    values = [cache.get(key, lambda key: bytes([key]) * 9_000) for key in range(97)]
    assert values == [bytes([key]) * 9_000 for key in range(97)]
    found = cache.statistics()
    assert found.hits > 5 and (found.damaged, found.failures) == (0, 0)
    assert 300_000 < store.used_bytes() <= 400_000
