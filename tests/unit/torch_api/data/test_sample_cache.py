"""The cache of samples in one process: seals, the host's store and its bound, stores that fail, clusters of stores."""

import os
import pickle
import resource
from pathlib import Path

import pytest
import torch

from bagua.torch_api.cache import loader as loader_module
from bagua.torch_api.cache.host_store import ENTRY_BYTES, HostStore
from bagua.torch_api.cache.seal import MARK, TAG_BYTES, Seal, host_secret
from bagua.torch_api.contrib import CachedDataset, CacheLoader
from bagua.torch_api.contrib.utils.store import Store, StoreError

SECRET = b"s" * 32


class Memory(Store):
    """A store of this process, which may be broken."""

    def __init__(self):
        self.kept = {}
        self.broken = False
        self.calls = 0

    def _check(self):
        self.calls += 1
        if self.broken:
            raise StoreError("It is broken.")

    def set(self, key, value):
        self._check()
        self.kept[key] = value

    def get(self, key):
        self._check()
        return self.kept.get(key)

    def num_keys(self):
        self._check()
        return len(self.kept)

    def clear(self):
        self.kept.clear()


class Slow:
    """A dataset that counts how often it is asked."""

    def __init__(self, length=10):
        self.length = length
        self.loaded = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.loaded += 1
        return {"x": torch.full((3,), float(index)), "label": index}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("BAGUA_JOB_SECRET", "BAGUA_JOB_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def small_files():
    """Call it, and no file of this process grows beyond 200 kB: as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def read(cached):
    for index in range(len(cached)):
        sample = cached[index]
        assert sample["label"] == index and torch.equal(sample["x"], torch.full((3,), float(index)))


# The loader


def test_values_are_loaded_once_and_outlive_the_job():
    slow = Slow()
    cached = CachedDataset(slow, dataset_name="slow", writer_buffer_size=3)
    read(cached)
    read(cached)
    cached.cache_loader.flush()
    assert slow.loaded == 10 and len(cached) == 10
    found = cached.cache_loader.statistics()
    assert (found.hits, found.misses, found.hit_rate) == (10, 10, 0.5)
    assert str(found).startswith("50.0% of 20 values came from the cache (0 damaged")
    later = CachedDataset(slow, dataset_name="slow")  # as in the next job
    read(later)
    assert slow.loaded == 10 and later.cache_loader.num_keys() == 10
    read(CachedDataset(slow, dataset_name="another"))
    assert slow.loaded == 20
    files = [path for path in Path(os.environ["BAGUA_CACHE_DIR"]).rglob("*") if path.is_file()]
    assert files and not any(path.stat().st_mode & 0o077 for path in files)


@pytest.mark.parametrize("damage", ["cut", "changed", "swapped", "other secret", "empty", "foreign pickle"])
def test_what_was_not_sealed_by_the_job_is_loaded_again(damage, tmp_path):
    store, slow = Memory(), Slow(2)
    read(CachedDataset(slow, store, writer_buffer_size=1, secret=SECRET))
    first, second = store.kept.values()
    evil = pickle.dumps(Touch(tmp_path / "was here"))
    others = {
        "cut": first[:-1],
        "changed": first[:-9] + bytes([first[-9] ^ 1]) + first[-8:],
        "swapped": second,
        "other secret": Seal(b"x" * 32).close("_0", {"label": 9}),
        "empty": b"",
        "foreign pickle": MARK + bytes(TAG_BYTES) + evil,
    }
    store.kept["_0"] = others[damage]
    cached = CachedDataset(slow, store, writer_buffer_size=1, secret=SECRET)
    read(cached)
    assert slow.loaded == 3 and cached.cache_loader.statistics().damaged == 1
    read(cached)
    assert slow.loaded == 3 and not (tmp_path / "was here").exists()


class Touch:
    """Unpickling it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_store_that_fails_costs_no_value(monkeypatch, caplog):
    now = 100.0
    monkeypatch.setattr(loader_module.time, "monotonic", lambda: now)
    store, slow = Memory(), Slow()
    cached = CachedDataset(slow, store, writer_buffer_size=1, secret=SECRET)
    read(cached)
    store.broken, store.calls = True, 0
    read(cached)
    assert slow.loaded == 20 and store.calls == 1, "it is left alone for a while"
    found = cached.cache_loader.statistics()
    assert (found.failures, found.uncached) == (1, 10)
    assert [record.message for record in caplog.records] == [
        "The sample cache of '': It is broken. Values are loaded without it."
    ]
    store.broken = False
    now += loader_module.PAUSE_S
    read(cached)
    assert slow.loaded == 20, "it is back"


def test_values_come_back_as_they_were():
    seal = Seal(SECRET)
    wide = torch.randn(1000, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    values = [wide[3], wide.t(), wide.bool(), wide.to(torch.bfloat16), torch.empty(0, 3), torch.tensor(2 + 1j).conj()]
    values += [torch.ones(3, dtype=torch.int64), torch.eye(3).to_sparse(), parameter]
    found = seal.open("k", seal.close("k", {"values": values, "text": ("a", b"b", None)}))
    assert found["text"] == ("a", b"b", None) and isinstance(found["values"][-1], torch.nn.Parameter)
    for one, other in zip(found["values"], values, strict=True):
        assert (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad)
        assert torch.equal(one.to_dense(), other.to_dense())
    found["values"][0].zero_()  # it may be written
    assert len(seal.close("k", wide[3])) < 500, "not the thousand rows behind it"


# Secrets


def test_the_jobs_secret_counts(monkeypatch, tmp_path):
    store = Memory()
    slow = Slow()
    read(CachedDataset(slow, store, writer_buffer_size=1))
    monkeypatch.setenv("BAGUA_JOB_SECRET", "one" * 12)
    read(CachedDataset(slow, store, writer_buffer_size=1))
    assert slow.loaded == 20, "sealed with the secret of this user"
    monkeypatch.delenv("BAGUA_JOB_SECRET")
    (tmp_path / "secret").write_text("one" * 12 + "\n")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("BAGUA_JOB_SECRET_FILE", str(tmp_path / "secret"))
    read(CachedDataset(slow, store))
    assert slow.loaded == 20


@pytest.mark.parametrize("bad", ["open", "damaged"])
def test_a_secret_that_is_no_good_means_no_cache(bad, caplog):
    host_secret()
    path = HostStore().folder / "secret"
    if bad == "open":
        path.chmod(0o644)
    else:
        path.write_bytes(b"short")
    slow = Slow()
    cached = CachedDataset(slow)
    read(cached)
    read(cached)
    assert slow.loaded == 20 and "not used" in caplog.text and cached.cache_loader.statistics().uncached == 20


# The store of a host


def test_the_store_of_a_host_is_bounded(tmp_path):
    store = HostStore(tmp_path / "s", capacity=50_000)
    for number in range(200):
        store.mset({f"{number}-{part}": bytes([number]) * 900 for part in range(5)})
        assert store.used_bytes() <= 50_000
    assert 40 <= store.num_keys() <= 50_000 // (900 + ENTRY_BYTES)
    assert store.used_bytes() == store.num_keys() * (900 + ENTRY_BYTES)
    store.set("too large", bytes(60_000))
    assert store.get("too large") is None and store.num_keys() >= 40
    store.mset({str(number): bytes(9_000) for number in range(20)})
    assert store.used_bytes() <= 50_000 and store.get("19") == bytes(9_000)
    store.set("19", b"new")
    assert store.get("19") == b"new" and store.mget(["19", "nosuch"]) == [b"new", None]
    assert store.path.stat().st_size < 300_000
    store.clear()
    assert store.num_keys() == store.used_bytes() == 0


@pytest.mark.parametrize("damage", ["garbage", "cut", "zeros in the middle"])
def test_a_damaged_file_begins_anew(damage, tmp_path, monkeypatch):
    slow = Slow()
    store = HostStore(tmp_path / "s")
    cached = CachedDataset(slow, store, writer_buffer_size=1)
    read(cached)
    store.shutdown()
    data = store.path.read_bytes()
    middle = len(data) // 2
    store.path.write_bytes(
        {
            "garbage": b"no database at all" * 1000,
            "cut": data[:middle],
            "zeros in the middle": data[:4096] + bytes(len(data) - 4096),
        }[damage]
    )
    monkeypatch.setattr(loader_module, "PAUSE_S", 0.0)
    for _ in range(3):
        read(cached)
    read(cached)
    assert slow.loaded <= 31 and cached.cache_loader.statistics().failures
    before = slow.loaded
    read(cached)
    assert slow.loaded == before, "and it works again"


def test_a_full_disk(tmp_path, small_files, monkeypatch):
    monkeypatch.setattr(loader_module, "PAUSE_S", 0.0)
    cache = CacheLoader(folder=tmp_path / "s")
    small_files()
    for _ in range(2):
        for key in range(30):
            assert cache.get(key, lambda key: bytes(20_000) + bytes([key])) == bytes(20_000) + bytes([key])
    found = cache.statistics()
    assert found.failures > 0 and found.uncached > 0 and found.hits > 0, "what could be written is there"


# Clusters
