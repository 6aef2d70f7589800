"""Loads values through a cache. A cache that fails costs time, never a value and never the training."""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from bagua.base.errors import ConfigError
from bagua.torch_api.cache.host_store import HostStore
from bagua.torch_api.cache.redis_store import RedisStore
from bagua.torch_api.cache.seal import Seal, given_secret, host_secret
from bagua.torch_api.cache.store import Store, StoreError

Found = TypeVar("Found")
LOG = logging.getLogger("bagua")
PAUSE_S = 5.0  # a store that failed is left alone so long
BACKENDS = ("host", "redis")
REDIS_OPTIONS = inspect.signature(RedisStore).parameters.keys()
PROCESSES = 64  # that count by themselves; more share rows
HITS, MISSES, DAMAGED, FAILURES, UNCACHED = range(5)


@dataclass(frozen=True)
class CacheStatistics:
    """Counts of one ``CacheLoader`` and the workers that it was handed to.

    ``hits``: values that the cache had. ``misses``: values that it did not have. ``damaged``: entries with a wrong
    checksum; they were loaded again, and are in ``misses``, too. ``failures``: times that the store could not be used.
    ``uncached``: values that were loaded and not kept, because of that or because they can't be pickled.
    """

    hits: int
    misses: int
    damaged: int
    failures: int
    uncached: int

    @property
    def hit_rate(self) -> float:
        """Hits of all values, from 0 to 1; 0 before the first."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        return (
            f"{self.hit_rate:.1%} of {self.hits + self.misses} values came from the cache ({self.damaged} damaged "
            f"entries, {self.failures} failures of the store, {self.uncached} values not kept)"
        )


class CacheLoader:
    """Values by key, loaded once and then taken from a cache that processes share.

    Args:
        backend: "host": a file of this host, which its ranks and later jobs of this user share. "redis": Redis servers,
            which several hosts share. Or a ``Store`` of one's own. None: "redis" with options of a ``RedisStore`` (the
            original's default), else "host".
        dataset_name: Keeps datasets in one cache apart. Give another one when the dataset, or how it is loaded,
            changes: nothing else tells the cache.
        writer_buffer_size: Values that are written together. A process writes the rest when it ends.
        secret: Values are sealed with it. By default BAGUA_JOB_SECRET or its file; else, on one host, a secret of this
            user there; else, over Redis, one that rank 0 makes for this job: then nothing outlives the job.
        **options: Of the store: ``folder`` and ``capacity`` of a ``HostStore``, those of ``RedisStore``.

    Nothing is unpickled without a checksum that only holders of the secret can make. An entry that is damaged, cut off
    or of another key is loaded again. A store that can't be used (a full disk, a folder without permission, a server
    that went away) is a warning; values are loaded without it, and it is tried again after five seconds.

    With ``backend="redis"`` all ranks make it together. Raises ValueError for another backend or wrong options.
    """

    def __init__(
        self,
        backend: str | Store | None = None,
        dataset_name: str = "",
        writer_buffer_size: int = 1,
        *,
        secret: bytes | None = None,
        **options: Any,
    ) -> None:
        if writer_buffer_size < 1:
            raise ValueError(
                f"writer_buffer_size is {writer_buffer_size}: it must be a whole number from 1 on. [BG705]"
            )
        if backend is None:
            backend = "redis" if options.keys() & REDIS_OPTIONS else "host"
        self.backend = backend
        self.dataset_name = dataset_name
        self.writer_buffer_size = writer_buffer_size
        self.store = _store(backend, options)
        self._counts = torch.zeros(PROCESSES, 5, dtype=torch.int64)  # shared memory: workers count there, too
        self._counts.share_memory_()  # type: ignore[no-untyped-call]
        self._seal = self._make_seal(secret)
        self._waiting: dict[str, bytes] = {}
        self._pid = 0
        self._closed_until = 0.0
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:  # a worker has values and an end of its own
        return self.__dict__ | {"_waiting": {}, "_pid": 0}

    def get(self, key: Any, load_fn: Callable[[Any], Any]) -> Any:
        """The value of ``key``: from the cache, else ``load_fn(key)``, which is kept. Raises what load_fn raises."""
        name = f"{self.dataset_name}_{key}"
        self._settle()
        found, value = self._read(name)
        if found:
            self._count(HITS)
            return value
        self._count(MISSES)
        value = load_fn(key)
        self._write(name, value)
        return value

    def num_keys(self) -> int:
        """Entries in the store, those of other datasets included. 0 where the store can't be used."""
        return self._try(self.store.num_keys) or 0

    def flush(self) -> None:
        """Writes values that still wait for others."""
        if self._waiting and self._pid == os.getpid():  # a forked worker has a copy of what its parent writes
            waiting, self._waiting = self._waiting, {}

            def write() -> bool:
                self.store.mset(waiting)
                return True

            if not self._try(write):
                self._count(UNCACHED, len(waiting))

    def statistics(self) -> CacheStatistics:
        """Returns the counts so far."""
        return CacheStatistics(*self._counts.sum(0).tolist())

    def _read(self, name: str) -> tuple[bool, Any]:
        sealed = self._waiting.get(name)
        if sealed is None:
            sealed = self._try(lambda: self.store.get(name))
        if sealed is None or self._seal is None:
            return False, None
        try:
            return True, self._seal.open(name, sealed)
        except Exception as error:  # a class that is gone, too: pickle raises anything
            self._count(DAMAGED)
            self._warn(f"Entry {name!r} is loaded again: {error}")
            return False, None

    def _write(self, name: str, value: Any) -> None:
        if self._seal is None or not self._usable():
            self._count(UNCACHED)
            return
        try:
            self._waiting[name] = self._seal.close(name, value)
        except Exception as error:  # pickle raises anything
            self._count(UNCACHED)
            self._warn(f"A {type(value).__name__} can't be pickled: {error}")
            return
        if len(self._waiting) >= self.writer_buffer_size:
            self.flush()

    def _settle(self) -> None:
        """A forked worker leaves to its parent what that has in its buffer, and writes its own when it ends."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._waiting = {}
            # Runs at the end of workers of multiprocessing, too, where atexit does not.
            Finalize(None, self.flush, exitpriority=1)

    def _make_seal(self, secret: bytes | None) -> Seal | None:
        """Makes the seal. None: there is no secret, and so no cache."""
        try:
            found = secret or given_secret()
            if found is None:
                found = self.store.shared_secret() if isinstance(self.store, RedisStore) else host_secret()
            return Seal(found)
        except (OSError, ConfigError) as error:
            self._count(FAILURES)
            LOG.warning("The sample cache is not used: %s", error)
            return None

    def _usable(self) -> bool:
        return time.monotonic() >= self._closed_until

    def _try(self, use: Callable[[], Found]) -> Found | None:
        """The result of ``use()``; None where the store fails, or has done so a moment ago."""
        if not self._usable():
            return None
        try:
            return use()
        except StoreError as error:
            self._closed_until = time.monotonic() + PAUSE_S  # without a pause each value would wait for the store
            self._count(FAILURES)
            self._warn(f"{error} Values are loaded without it.")
            return None

    def _count(self, column: int, number: int = 1) -> None:
        worker = get_worker_info()
        # Workers write no common row as long as there are rows.
        row = 0 if worker is None else 1 + worker.id % (PROCESSES - 1)
        self._counts[row, column] += number

    def _warn(self, words: str) -> None:
        """Warns once; ``statistics`` counts the other times."""
        if not self._warned:
            self._warned = True
            LOG.warning("The sample cache of %r: %s", self.dataset_name, words)


def _store(backend: str | Store, options: dict[str, Any]) -> Store:
    if isinstance(backend, Store):
        if options:
            raise ValueError(
                f"Options {', '.join(options)} go with a backend by name: this one is a store already. [BG705]"
            )
        return backend
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}: choose one of {', '.join(BACKENDS)}, or pass a Store. [BG705]")
    made: type[Store] = HostStore if backend == "host" else RedisStore
    try:
        return made(**options)
    except TypeError as error:
        raise ValueError(f"These options don't fit backend={backend!r}: {error}. [BG705]") from error
