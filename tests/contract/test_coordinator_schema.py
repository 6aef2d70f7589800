"""The schema of a coordinator's database: migrations, and databases that can't be used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from bagua.base.errors import ConfigError, UnavailableError
from bagua.daemon.coordinator.rules.domain import JobState
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store import models
from bagua.daemon.coordinator.store.database import open_engine
from bagua.daemon.coordinator.store.migrations import HEAD, KNOWN
from bagua.daemon.coordinator.store.migrations.upgrade import config, upgrade
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2


def test_the_migrations_make_what_the_code_expects(database_url: str):
    engine = sa.create_engine(database_url)
    try:
        with engine.begin() as connection:
            upgrade(connection)
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        with engine.begin() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert context.get_current_revision() == HEAD
            assert compare_metadata(context, models.metadata) == []
    finally:
        engine.dispose()
    Store(open_engine(database_url)).close()


def test_an_empty_database_gets_the_newest_schema(open_database: Callable[[], sa.Engine]):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with open_database().begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert context.get_current_revision() == HEAD
        assert compare_metadata(context, models.metadata) == []


def test_a_database_of_the_first_version_keeps_its_jobs(database_url: str):
    engine = sa.create_engine(database_url)
    wire = checked_spec(common_pb2.JobSpec(name="name", entry="t.py", nnodes=2, nproc_per_node=2)).wire
    with engine.begin() as connection:
        upgrade(connection, "0001")
        for number, (name, state) in enumerate((("job-1", 3), ("job-2", 6), ("job-3", 1))):
            values = {"id": name, "spec": wire, "state": state, "key": b"key", "now": 1e9 + number}
            connection.execute(sa.text(_OLD_JOB), values)
        for name, phase in (("job-1", 2), ("job-2", 3)):
            for index in range(2):
                values = {"id": name, "i": index, "node": "ab"[index], "first": 2 * index, "phase": phase}
                connection.execute(sa.text(_OLD_HOST), values)
                for local in range(2):
                    values = {"id": name, "rank": 2 * index + local, "local": local, "node": "ab"[index]}
                    connection.execute(sa.text(_OLD_RANK), values)
    engine.dispose()
    store = Store(open_engine(database_url))
    with store.read() as tx:
        assert set(tx.live()) == {"job-1", "job-3"}
        running = tx.job("job-1")
        assert running is not None and running.state is JobState.RUNNING
        assert [(rank.rank, rank.node_id, rank.pid) for rank in running.ranks] == [
            (0, "a", 100),
            (1, "a", 101),
            (2, "b", 102),
            (3, "b", 103),
        ]
        ended = tx.stored(["job-2"])[0]
        assert ended.job.finished_at == 1e9 and len(ended.job.ranks) == 4 and ended.owner is None
    store.close()


_OLD_JOB = """INSERT INTO jobs VALUES (:id, NULL, 'name', :spec, :state, 'why', NULL, NULL, 1, :now, :now, 0,
    CASE WHEN :state = 6 THEN 1e9 ELSE 0 END, '::1', 20001, :key, 0, 4, 'somebody', 5e9)"""
_OLD_HOST = """INSERT INTO job_hosts VALUES (:id, :i, :node, 'h', '::1', 'boot', :first, 2, :phase, '', '', 0, '')"""
_OLD_RANK = """INSERT INTO job_ranks VALUES (:id, :rank, :local, :node, 2, 100 + :rank, 0, 0, '', '/log', 0, 0)"""


def test_the_known_revisions_are_those_of_the_files(open_database: Callable[[], sa.Engine]):
    from alembic.script import ScriptDirectory

    with open_database().connect() as connection:
        scripts = ScriptDirectory.from_config(config(connection))
    assert tuple(reversed([script.revision for script in scripts.walk_revisions()])) == KNOWN
    assert scripts.get_heads() == [HEAD]


def test_a_newer_schema_is_refused_with_words(database_url: str):
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigError, match=r"has schema 9999, which bagua .* does not know: a newer version made it"):
        open_engine(database_url)


def test_coordinators_that_start_at_once_make_the_schema_once(database_url: str):
    together = threading.Barrier(8)

    def start(_: int) -> sa.Engine:
        together.wait()
        return open_engine(database_url)

    with ThreadPoolExecutor(8) as pool:
        engines = list(pool.map(start, range(8)))
    for engine in engines:
        engine.dispose()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "can't be read: write sqlite:///FILE"),
        ("mysql://x/y", "'mysql' are not supported"),
        ("postgresql://u:secret@127.0.0.1:1/x", r"u:\*\*\*@127.0.0.1:1/x does not answer .*[Cc]onnection"),
        ("sqlite:////dev/null/x.db", "/dev/null/x.db can't be used: Not a directory"),
    ],
)
def test_a_database_that_can_not_be_used_is_named(url: str, words: str):
    with pytest.raises((ConfigError, UnavailableError), match=words) as caught:
        open_engine(url)
    assert isinstance(caught.value, UnavailableError) == ("does not answer" in words), "systemd tries that again"
    assert "secret" not in str(caught.value)
