"""Copies a coordinator's database into one file, and back.

A backup is always an SQLite database with the schema of the original. Of SQLite it is made by SQLite's own backup, of
PostgreSQL by reading all tables in one snapshot. So a backup needs no program of the database, can be opened and
checked anywhere, and one of SQLite can be restored into PostgreSQL and the other way round.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy as sa

import bagua
from bagua.base.disk import disk_words
from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.admin.check import Report, check_database, count_rows
from bagua.daemon.coordinator.store.database import (
    MIGRATION_LOCK,
    config_words,
    connect_engine,
    read_only_url,
    refuse_tables_of_others,
    revision_of,
    sqlite_url,
)
from bagua.daemon.coordinator.store.database_errors import shown_url
from bagua.daemon.coordinator.store.migrations import KNOWN, maker
from bagua.daemon.coordinator.store.migrations.upgrade import upgrade

_ROWS = 100  # in memory at once: a piece of code has 256 KiB
_BEAT_S = 6.0  # a coordinator that runs has written its clock within this time
_LOOK_S = 0.2
_VERSIONS = "alembic_version"


def back_up(url: str, target: Path, replace: bool = False) -> Report:
    """Writes ``target`` (mode 0600) as of one moment, while coordinators go on; returns what a check found. A file
    that is there stays as it was unless all went well. Raises ConfigError."""
    if os.path.exists(target) and not replace:  # Path.exists raises where the folder is closed
        raise ConfigError(f"{target} exists already: choose another name, or give --replace. [BG818]")
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with _private_file(temporary), _engine(url) as source:
            with config_words(source.url):
                _copy_out(source, temporary)
            _settle(temporary)
            report = check_database(read_only_url(temporary))
            os.replace(temporary, target)
    except OSError as error:
        raise ConfigError(f"The backup can't be written. {disk_words(error, target)} [BG818]") from error
    return report


def restore(backup: Path, url: str, replace: bool = False) -> Report:
    """Puts a backup in the place of the database ``url``, and brings its schema to that of this version; all of it, or
    nothing. The caller holds the state folder. Raises ConfigError: the backup is damaged, or of a newer version; a
    coordinator runs on the database; the database holds jobs, and ``replace`` is not given."""
    report = _checked(backup)
    parsed = sa.make_url(url)
    file = Path(parsed.database or "") if parsed.get_backend_name() == "sqlite" else None
    if file is None or file.exists():
        _refuse_if_used(parsed, url, replace)
    if file is None:
        with config_words(parsed):
            _into_postgresql(backup, url)
    else:
        _into_file(backup, file)
    return report


def _checked(backup: Path) -> Report:
    if not backup.is_file():
        raise ConfigError(f"There is no backup {backup}. [BG818]")
    report = check_database(read_only_url(backup))
    if not report.schema:
        raise ConfigError(f"{backup} is not a backup of a coordinator: it has no schema version. [BG818]")
    if report.schema not in KNOWN:
        raise ConfigError(
            f"{backup} has schema {report.schema}, which bagua {bagua.__version__} does not know: "
            f"{maker(report.schema)} made it. Restore it with that version. [BG817]"
        )
    if report.problems:
        raise ConfigError(f"{backup} is damaged and is not restored: {report.problems[0]} [BG818]")
    return report


def _refuse_if_used(parsed: sa.URL, url: str, replace: bool) -> None:
    try:
        with _engine(url) as engine:
            before = _beats(engine)
            deadline = time.monotonic() + (_BEAT_S if before else 0.0)  # no clocks: none has ever run
            while time.monotonic() < deadline:
                time.sleep(_LOOK_S)
                if _beats(engine) != before:
                    raise ConfigError(
                        f"A coordinator runs on the database {shown_url(engine.url)}. Stop all of them, then restore. "
                        "[BG818]"
                    )
            with engine.connect() as connection:
                jobs = count_rows(connection, "jobs")
    except sa.exc.DatabaseError:
        if parsed.get_backend_name() != "sqlite":
            with config_words(parsed):
                raise
        jobs = 1  # a damaged file: it is kept, too
    if jobs and not replace:
        raise ConfigError(
            "The database is not empty: what is in it would be lost. Make a backup of it, then give --replace. [BG818]"
        )


def _beats(engine: sa.Engine) -> set[tuple[str, float]]:
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("coordinators"):
            return set()
        rows = connection.execute(sa.text("SELECT owner, clock FROM coordinators"))
        return {(row.owner, row.clock) for row in rows}


# ---- out


def _copy_out(source: sa.Engine, file: Path) -> None:
    if source.dialect.name == "sqlite":
        _copy_file(source, file)
        return
    with source.connect().execution_options(isolation_level="REPEATABLE READ") as reader:  # one snapshot for all tables
        revision = revision_of(reader)
        if revision not in KNOWN:
            raise ConfigError(
                f"The database {shown_url(source.url)} has schema {revision or 'none'}, which bagua "
                f"{bagua.__version__} does not know: make the backup with the version of the coordinator. [BG817]"
            )
        with _engine(sqlite_url(file)) as copy, copy.begin() as writer:
            upgrade(writer, revision)
            _copy_rows(reader, writer)


def _copy_file(source: sa.Engine, file: Path) -> None:
    raw = source.raw_connection()
    try:
        with closing(sqlite3.connect(file)) as copy:
            raw.driver_connection.backup(copy)  # type: ignore[union-attr]
            copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a journal beside it
    finally:
        raw.close()


def _copy_rows(reader: sa.Connection, writer: sa.Connection) -> None:
    """Copies all tables; both databases have the same schema."""
    tables = sa.MetaData()
    tables.reflect(writer)
    for table in tables.sorted_tables:
        if table.name == _VERSIONS:
            continue
        writer.execute(sa.delete(table))  # rows that migrations have written
        rows = reader.execution_options(yield_per=_ROWS).execute(sa.select(table))
        for part in rows.mappings().partitions():
            writer.execute(sa.insert(table), [dict(row) for row in part])
        if writer.dialect.name == "postgresql":
            _continue_numbers(writer, table)


def _continue_numbers(writer: sa.Connection, table: sa.Table) -> None:
    """The next row that PostgreSQL numbers comes after those that were restored."""
    for column in table.primary_key.columns:
        if isinstance(column.type, sa.Integer):
            where = sa.func.pg_get_serial_sequence(table.name, column.name)
            name = writer.execute(sa.select(where)).scalar_one_or_none()
            if name:
                last = sa.select(sa.func.coalesce(sa.func.max(column), 0) + 1).scalar_subquery()
                writer.execute(sa.select(sa.func.setval(name, last, False)))


# ---- in


def _into_file(backup: Path, file: Path) -> None:
    """Copies a backup into the file of the database. The old one stays beside it, under another name."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        with _private_file(temporary):
            with _engine(read_only_url(backup)) as source:
                _copy_out(source, temporary)
            with _engine(sqlite_url(temporary)) as engine, engine.begin() as connection:
                upgrade(connection)
            _settle(temporary)
            _put_aside(file)
            os.replace(temporary, file)
    except OSError as error:
        raise ConfigError(f"The database can't be restored. {disk_words(error, file)} [BG818]") from error


def _put_aside(file: Path) -> None:
    kept = file.with_name(f"{file.name}.before-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    for end in ("-wal", "-shm", "-journal", ""):  # its journals first: SQLite would apply them to a file of that name
        old = file.with_name(file.name + end)
        if old.exists():
            old.rename(kept.with_name(kept.name + end))


def _into_postgresql(backup: Path, url: str) -> None:
    with _engine(read_only_url(backup)) as source, _engine(url) as target:
        with source.connect() as reader, target.begin() as writer:
            writer.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))  # a coordinator that starts waits
            refuse_tables_of_others(writer, shown_url(target.url))
            old = sa.MetaData()
            old.reflect(writer)
            old.drop_all(writer)
            upgrade(writer, str(revision_of(reader)))  # rows of the backup fit into its own schema alone
            _copy_rows(reader, writer)
            upgrade(writer)


# ---- helpers


@contextmanager
def _engine(url: str) -> Iterator[sa.Engine]:
    engine = connect_engine(url)
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _private_file(path: Path) -> Iterator[None]:
    """An empty file of this user alone; whatever happens, nothing stays of it under this name."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        yield
    finally:
        for end in ("", "-wal", "-shm", "-journal"):
            path.with_name(path.name + end).unlink(missing_ok=True)


def _settle(file: Path) -> None:
    """Makes the database one file, and waits until it is on the disk."""
    with closing(sqlite3.connect(file)) as database:
        database.execute("PRAGMA journal_mode=DELETE")
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # before the rename: a crash must leave the old file, or all of the new one
    finally:
        os.close(descriptor)
