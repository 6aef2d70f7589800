"""The cache of samples with several processes: ranks, workers of loaders, writers that are killed."""

import faulthandler
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.torch_api.cache.host_store import HostStore
from bagua.torch_api.cache.redis_store import START_S, RedisStore
from bagua.torch_api.contrib import CachedDataset, CacheLoader

FORK = multiprocessing.get_context("fork")
LENGTH = 60


class Recorded:
    """A dataset that notes each load in a file."""

    def __init__(self, record):
        self.record = record

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        with self.record.open("a") as file:
            file.write(f"{index}\n")
        return torch.full((100,), float(index))


def rank_read(folder):
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


def test_ranks_share_a_cache(ranks, tmp_path):
    started = ranks.run(rank_read, 2, folder=str(tmp_path))
    for total, counts in started:
        assert total == 100 * sum(range(LENGTH)) and counts == [LENGTH, LENGTH // 2, 0]
    assert len((tmp_path / "record").read_text().split()) == LENGTH


def end_if_stuck(_):
    """A worker that hangs says where, and ends."""
    faulthandler.dump_traceback_later(60.0, exit=True)


def rank_fill(folder):
    """A loader's workers read all samples twice. Each writes the rest of its buffer when it ends."""
    bagua.init_process_group()
    record = Path(folder, "record")
    cached = CachedDataset(Recorded(record), folder=Path(folder, "cache"), writer_buffer_size=7)
    loader = DataLoader(cached, 4, num_workers=2, worker_init_fn=end_if_stuck, multiprocessing_context="fork")
    for _ in range(2):
        assert torch.cat(list(loader))[:, 0].tolist() == list(range(LENGTH))
    assert len(record.read_text().split()) == LENGTH
    found = cached.cache_loader.statistics()  # of all workers
    assert (found.hits, found.misses, found.damaged) == (LENGTH, LENGTH, 0)
    assert cached.cache_loader.num_keys() == LENGTH


def test_workers_that_are_forked_fill_it(ranks, tmp_path):
    ranks.run(rank_fill, 1, folder=str(tmp_path))


def write_for_ever(folder, number, begun):
    """Writes and reads until it is killed."""
    cache = CacheLoader(folder=folder, capacity=400_000, writer_buffer_size=3)
    step = 0
    while True:
        key = (step * 7 + number) % 97
        assert cache.get(key, lambda key: bytes([key]) * 9_000) == bytes([key]) * 9_000
        step += 1
        if step == 20:
            begun.release()


def rank_kill_writers(folder):
    """Starts writers on one cache, and kills one after the other; at last all of them."""
    begun = FORK.Semaphore(0)
    writers = []
    for number in range(9):
        writers.append(FORK.Process(target=write_for_ever, args=(Path(folder), number, begun)))
        writers[-1].start()
        assert begun.acquire(timeout=60.0)
        if len(writers) >= 3:
            killed = writers.pop(0)
            os.kill(killed.pid, signal.SIGKILL)
            killed.join()
            assert killed.exitcode == -signal.SIGKILL
    for writer in writers:
        assert writer.is_alive(), "no writer ever failed"
        writer.kill()
        writer.join()


def test_writers_that_are_killed(ranks, tmp_path, monkeypatch):
    """SIGKILL at any moment leaves a cache that is whole, bounded and can be used at once."""
    monkeypatch.setenv("BAGUA_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "shared"
    ranks.run(rank_kill_writers, 1, folder=str(folder))
    store = HostStore(folder, capacity=400_000)
    cache = CacheLoader(store)
    values = [cache.get(key, lambda key: bytes([key]) * 9_000) for key in range(97)]
    assert values == [bytes([key]) * 9_000 for key in range(97)]
    found = cache.statistics()
    assert found.hits > 5 and (found.damaged, found.failures) == (0, 0)
    assert 300_000 < store.used_bytes() <= 400_000


def test_a_redis_server_that_ends_at_once(tmp_path, monkeypatch):
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho 'FATAL: a bad directive'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="FATAL: a bad directive"):
        RedisStore()
    assert time.monotonic() - began < START_S
