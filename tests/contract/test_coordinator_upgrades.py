"""Databases of every version so far, made by the coordinators of those versions, come to the newest schema.

``schemas/NNNN.sql`` is a dump of SQLite with four jobs: one has ended, one was cancelled, one runs on two nodes, one
waits. A new schema version gets a dump of its own when it is released.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from bagua.daemon.coordinator.admin.backup import restore
from bagua.daemon.coordinator.admin.check import check_database
from bagua.daemon.coordinator.rules.domain import JobState
from bagua.daemon.coordinator.store.database import open_engine
from bagua.daemon.coordinator.store.migrations import HEAD, KNOWN
from bagua.daemon.coordinator.store.store import Store

DUMPS = {path.stem: path for path in sorted((Path(__file__).parent / "schemas").glob("*.sql"))}
TOKENS = {"0008": {"ann": "", "host-7": "", "eve": ""}}
"""Accounts of the dumps, and their Unix users."""
RELEASED = "0003"
"""Of bagua 0.1.0."""


def load(dump: Path, file: Path) -> Path:
    with closing(sqlite3.connect(file)) as database:
        database.executescript(dump.read_text())
    return file


def test_versions_that_were_released_have_a_dump():
    assert RELEASED in DUMPS and set(DUMPS) <= set(KNOWN)


@pytest.mark.parametrize("version", DUMPS)
def test_a_database_of_a_former_version_goes_on(version: str, database_url: str, tmp_path: Path):
    """In place with SQLite; into PostgreSQL as a backup that is restored."""
    if database_url.startswith("sqlite"):
        load(DUMPS[version], tmp_path / "bagua.db")
    else:
        restore(load(DUMPS[version], tmp_path / "backup.db"), database_url)
    store = Store(open_engine(database_url))
    try:
        with store.read() as tx:
            live = {stored.job.spec.name: stored for stored in tx.stored(list(tx.live()))}
            assert {name: stored.job.state for name, stored in live.items()} == {
                "running": JobState.RUNNING,
                "waiting": JobState.PENDING,
            }
            running = live["running"].job
            assert [rank.rank for rank in running.ranks] == [0, 1, 2, 3] and all(rank.pid for rank in running.ranks)
            assert len(tx.events(running.job_id, 0, 100)) == live["running"].last_event > 2
            assert not any(stored.job.unix_user for stored in live.values())
            assert {token.name: token.unix_user for token in tx.tokens()} == TOKENS.get(version, {})
            assert {node.node_id: node.slots for node in tx.nodes()} == {"node-0000": 4, "node-0001": 4}
    finally:
        store.close()
    report = check_database(database_url)
    assert report.problems == () and report.schema == HEAD
    assert report.jobs == {"PENDING": 1, "RUNNING": 1, "SUCCEEDED": 1, "CANCELLED": 1}
