"""The schema of a coordinator's database: migrations, and databases that can't be used."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from bagua.base.errors import ConfigError, UnavailableError
from bagua.daemon.coordinator.admin.backup import back_up, restore
from bagua.daemon.coordinator.store import models
from bagua.daemon.coordinator.store.database import connect_engine, open_engine, sqlite_url
from bagua.daemon.coordinator.store.migrations import HEAD
from bagua.daemon.coordinator.store.migrations.upgrade import upgrade
from bagua.daemon.coordinator.store.store import Store


def test_the_migrations_make_what_the_code_expects(database_url):
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


def test_the_models_are_those_of_the_last_revision():
    """A database that there is changes by a revision alone: see ``v1001_first``."""
    columns = [
        (table.name, column.name, str(column.type), column.nullable, column.primary_key)
        for table in models.metadata.sorted_tables
        for column in table.columns
    ]
    assert HEAD == "1003"
    assert hashlib.sha256(repr(columns).encode()).hexdigest()[:12] == "121d22e2da5e"


def test_a_database_of_the_first_revision_gets_what_later_ones_add(database_url):
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        upgrade(connection, "1001")
        connection.execute(sa.text("ALTER TABLE nodes DROP COLUMN wire_version"))
        connection.execute(sa.text("ALTER TABLE jobs DROP COLUMN accusations"))
    engine.dispose()
    open_engine(database_url).dispose()
    test_the_migrations_make_what_the_code_expects(database_url)


def test_a_newer_schema_is_refused_with_words(database_url):
    engine = open_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigError, match=r"has schema 9999, which bagua .* does not know: a newer version made it"):
        open_engine(database_url)


def test_a_database_of_another_program_is_left_alone(database_url, tmp_path):
    open_engine(sqlite_url(tmp_path / "ours.db")).dispose()
    back_up(sqlite_url(tmp_path / "ours.db"), tmp_path / "backup.db")
    engine = connect_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE users (id INTEGER)"))
    with pytest.raises(ConfigError, match="is that of another program: it has the table 'users'"):
        open_engine(database_url)
    if database_url.startswith("postgresql"):  # a file is put aside
        with pytest.raises(ConfigError, match="is that of another program: it has the table 'users'"):
            restore(tmp_path / "backup.db", database_url, replace=True)
    assert sa.inspect(engine).get_table_names() == ["users"]
    engine.dispose()


def test_coordinators_that_start_at_once_make_the_schema_once(database_url):
    together = threading.Barrier(8)

    def start(_):
        together.wait()
        return open_engine(database_url)

    with ThreadPoolExecutor(8) as pool:
        engines = list(pool.map(start, range(8)))
    for engine in engines:
        engine.dispose()


def test_a_database_that_can_not_be_used_is_named():
    for url, error, words in (
        ("nonsense", ConfigError, "can't be read: write sqlite:///FILE"),
        ("mysql://x/y", ConfigError, "'mysql' are not supported"),
        ("sqlite:////dev/null/x.db", ConfigError, "/dev/null/x.db can't be used: Not a directory"),
        # systemd tries that again
        (
            "postgresql://u:secret@127.0.0.1:1/x",
            UnavailableError,
            r"u:\*\*\*@127.0.0.1:1/x does not answer .*onnection",
        ),
    ):
        with pytest.raises(error, match=words) as caught:
            open_engine(url)
        assert "secret" not in str(caught.value)
