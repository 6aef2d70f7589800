"""A database that is full, damaged, read-only or locked: words that name it, and life goes on once it is mended."""

import os
import sqlite3
import stat
from contextlib import closing

import pytest

from bagua.base.errors import ConfigError, ServiceError, UnavailableError
from bagua.daemon.coordinator.rules.domain import JobRecord
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2

LARGE = checked_spec(common_pb2.JobSpec(entry="t.py", args=["x" * 100_000], nnodes=1, nproc_per_node=1))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "bagua.db"


def submit(engine, job_id):
    job = JobRecord(job_id, LARGE, 100.0, reason="submitted", job_key=b"k")
    with Store(engine).transaction() as tx:
        assert tx.create_job(job, None, "me")
    return job


def find(engine, job_id):
    with Store(engine).transaction() as tx:
        return tx.job(job_id)


def execute(engine, pragma):
    connection = engine.raw_connection()
    try:
        connection.cursor().execute(pragma)
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("begin", "end", "words"),
    [  # the first is SQLite's own way to be full
        ("max_page_count=1", "max_page_count=100000", "The disk of {0.parent} is full.*bagua.db.*goes on by itself"),
        ("query_only=1", "query_only=0", r"{0} can't be written \(attempt to write a readonly database"),
    ],
    ids=["full", "read-only"],
)
def test_a_full_disk_and_a_read_only_one_are_named_and_pass(file, begin, end, words):
    engine = open_engine(sqlite_url(file))
    with closing(Store(engine)):
        first = submit(engine, "first")
        execute(engine, f"PRAGMA {begin}")
        with pytest.raises(UnavailableError, match=words.format(file)):
            submit(engine, "second")
        execute(engine, f"PRAGMA {end}")
        assert find(engine, "first") == first and find(engine, "second") is None
        assert submit(engine, "second") == find(engine, "second")


def test_a_database_that_was_damaged_while_it_was_open(file):
    engine = open_engine(sqlite_url(file))
    with closing(Store(engine)):
        submit(engine, "first")
        execute(engine, "PRAGMA wal_checkpoint(TRUNCATE)")
        size = file.stat().st_size
        with open(file, "r+b") as damaged:
            damaged.seek(4096)
            damaged.write(os.urandom(size - 4096))
        execute(engine, "PRAGMA shrink_memory")
        with pytest.raises(ServiceError, match=rf"{file} is damaged \(database disk image is malformed\).*\.recover"):
            find(engine, "first")
        with pytest.raises(ServiceError, match="is damaged"), Store(engine).read() as tx:
            tx.job("first")


@pytest.mark.parametrize("damage", ["header", "half", "text"])
def test_a_damaged_database_is_refused_at_the_start(file, damage):
    open_engine(sqlite_url(file)).dispose()
    whole = file.read_bytes()
    file.write_bytes({"header": b"\0" * 100 + whole[100:], "half": whole[: len(whole) // 2], "text": b"no"}[damage])
    with pytest.raises(ConfigError, match=f"{file} is damaged"):
        open_engine(sqlite_url(file))


def test_a_database_that_another_program_holds(file):
    engine = open_engine(sqlite_url(file))
    other = sqlite3.connect(file, isolation_level=None)
    with closing(Store(engine)), closing(other):
        execute(engine, "PRAGMA busy_timeout=1")
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnavailableError, match=f"{file} is locked by another program"):
            submit(engine, "job-3")
        other.execute("ROLLBACK")
        submit(engine, "job-4")


@pytest.mark.parametrize("before", [None, 0o666])
def test_the_files_of_the_database_are_private(file, before):
    names = ("bagua.db", "bagua.db-wal", "bagua.db-shm")
    if before is not None:  # as an earlier version, or an umask, left them
        holder = open_engine(sqlite_url(file))
        submit(holder, "job-5")
        for name in names:
            (file.parent / name).chmod(before)
    engine = open_engine(sqlite_url(file))
    with closing(Store(engine)):
        submit(engine, "job-6")
        modes = {name: stat.S_IMODE((file.parent / name).stat().st_mode) for name in names}
    assert modes == dict.fromkeys(names, 0o600)
    if before is not None:
        holder.dispose()
