"""Opens the database and migrates its schema."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy import event

import bagua
from bagua.base.disk import disk_words
from bagua.base.errors import ConfigError, UnavailableError
from bagua.daemon.coordinator.store import models
from bagua.daemon.coordinator.store.database_errors import describe, shown_url
from bagua.daemon.coordinator.store.execution import READ_ONLY
from bagua.daemon.coordinator.store.migrations import HEAD, KNOWN, before_first

_BUSY_TIMEOUT_MS = 10_000
_MADE_S = 2.0
_LOOK_S = 0.05
_LEAST_BYTES = 2  # SQLite takes a single byte for an empty database
MIGRATION_LOCK = 0x6261677561  # any number of our own, for pg_advisory_lock


def sqlite_url(path: Path) -> str:
    """The URL of a database file."""
    return f"sqlite:///{path}"


def read_only_url(path: Path) -> str:
    """The same, for whoever only reads: no journal appears beside the file."""
    return f"sqlite:///file:{quote(str(path.absolute()))}?mode=ro&uri=true"


def open_engine(url: str) -> sa.Engine:
    """An engine for ``url``, its schema at head. Raises ConfigError: a bad URL, a newer schema, a full disk, a damaged
    file, one that has lost its content, tables of another program; UnavailableError: a server that does not answer."""
    new = _is_new(url)
    engine = connect_engine(url)
    try:
        with config_words(engine.url):
            deadline = time.monotonic() + _MADE_S
            while not ensure_schema(engine, shown_url(engine.url), new):
                if time.monotonic() > deadline:
                    raise _lost(f"The database {shown_url(engine.url)} has no tables")
                time.sleep(_LOOK_S)
    except BaseException:
        engine.dispose()
        raise
    return engine


def connect_engine(url: str) -> sa.Engine:
    """An engine for ``url``, whatever its schema; it has not connected yet. Raises ConfigError: a bad URL, a package
    that is missing, a file that can't be used."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise ConfigError(f"The database URL can't be read: write sqlite:///FILE or {_EXAMPLE}. [BG816]") from error
    backend = parsed.get_backend_name()
    if backend not in ("sqlite", "postgresql"):
        raise ConfigError(f"Databases of type {backend!r} are not supported: use sqlite or postgresql. [BG816]")
    try:
        if backend == "sqlite":
            return _sqlite_engine(parsed)
        from bagua.daemon.coordinator.store.postgresql import open_server  # needs a package of its own

        return open_server(parsed)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"PostgreSQL needs the package {error.name}: pip install 'bagua[postgresql]'. [BG209]"
        ) from error


@contextlib.contextmanager
def config_words(url: sa.URL) -> Iterator[None]:
    """Raises for an error of the database: UnavailableError if a server does not answer, which may pass; else
    ConfigError."""
    try:
        yield
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        shown = shown_url(url)
        detail = str(error.orig if isinstance(error, sa.exc.DBAPIError) else error).strip()
        found = describe(error, url)
        words = found.words if found else f"The database {shown} can't be used: {' '.join(detail.split())}"
        passes = found is not None and found.may_pass and url.get_backend_name() == "postgresql"
        raise (UnavailableError if passes else ConfigError)(f"{words} [BG816]") from error


_EXAMPLE = "postgresql://USER@HOST/NAME"


def _sqlite_engine(url: sa.URL) -> sa.Engine:
    if (file := _file(url)) is not None:
        _make_private(file)
    engine = sa.create_engine(url)

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # the driver must not begin transactions by itself
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
        if url.query.get("mode") != "ro":
            _set_wal(cursor)
        # Acknowledged changes survive a power cut: callers share a transaction, and with it the wait for the disk.
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")  # SQLite leaves them out unless asked, in each connection
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        reads = connection.get_execution_options().get(READ_ONLY)
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")  # to upgrade a read lock later may deadlock

    return engine


def _file(url: str | sa.URL) -> Path | None:
    """Returns the file of SQLite, if it is one, and may be written."""
    with contextlib.suppress(sa.exc.ArgumentError):
        parsed = sa.make_url(url)
        name = parsed.database or ":memory:"
        if parsed.get_backend_name() == "sqlite" and name != ":memory:" and not name.startswith("file:"):
            return Path(name)
    return None


def _is_new(url: str) -> bool:
    """True if the database may be empty. Raises ConfigError for a file that has lost its content: taken for a new one,
    it would end all jobs. Waits for a coordinator beside this one that has just made it."""
    file = _file(url)
    if file is None:
        return True
    deadline = time.monotonic() + _MADE_S
    while file.is_file() and (size := file.stat().st_size) < _LEAST_BYTES:
        if time.monotonic() > deadline:
            raise _lost(f"The database {file} is empty ({size} bytes)")
        time.sleep(_LOOK_S)
    journal = file.with_name(file.name + "-wal")
    if not file.exists() and journal.exists() and journal.stat().st_size:  # SQLite would delete it
        raise _lost(f"The database {file} is missing, and its journal {journal.name} is there")
    return not file.exists()


def _lost(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: it was cut off or copied without its -wal file, or a disk was full. Restore a backup; remove what is "
        "there only if the service never had a job, or all its jobs may be forgotten. [BG816]"
    )


def _make_private(file: Path) -> None:
    """The database belongs to this user alone, also where it was open to others before: it holds the environments of
    jobs. SQLite gives the files that it adds the mode of the first. Raises ConfigError."""
    try:
        os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        for found in (file, *(file.with_name(file.name + end) for end in ("-wal", "-shm", "-journal"))):
            with contextlib.suppress(FileNotFoundError):  # another coordinator's journal comes and goes
                if found.stat().st_mode & 0o177:
                    found.chmod(0o600)
    except OSError as error:
        raise ConfigError(f"The database can't be used. {disk_words(error)} [BG816]") from error


def _set_wal(cursor: sqlite3.Cursor) -> None:
    """Write-ahead logging, which a database keeps.

    For the lock of its first switch SQLite does not wait the busy timeout: coordinators that start at once would see
    "database is locked".
    """
    deadline = time.monotonic() + _BUSY_TIMEOUT_MS / 1000
    while True:
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0.001, 0.02))  # nothing tells when the lock is free


def ensure_schema(engine: sa.Engine, shown: str, new: bool) -> bool:
    """Makes or upgrades the tables. False: there are none, and the database is not ``new``. Raises ConfigError for a
    schema that this code does not know."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":  # several coordinators may start at once
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
        revision = revision_of(connection)
        if revision == HEAD:
            return True
        if revision is not None and before_first(revision):
            raise ConfigError(
                f"The database {shown} has schema {revision}, which a development version before 1.0 made: no upgrade "
                "leads from there. Let its jobs end with that version, then move the database away, or use another "
                "database or state folder. Accounts and tuned settings begin anew. [BG817]"
            )
        if revision is not None and revision not in KNOWN:
            raise ConfigError(
                f"The database {shown} has schema {revision}, which bagua {bagua.__version__} does not know: a newer "
                "version made it. Install that version, or use another database or state folder. [BG817]"
            )
        if revision is None:
            refuse_tables_of_others(connection, shown)
            if new:
                _create(connection)
            return new
        # Imported here: it costs a quarter of a second, and the schema is at head nearly always.
        from bagua.daemon.coordinator.store.migrations.upgrade import upgrade

        upgrade(connection)
        return True


def refuse_tables_of_others(connection: sa.Connection, shown: str) -> None:
    """Raises ConfigError if the database has tables, and no schema of ours."""
    tables = sa.inspect(connection).get_table_names()
    if tables and revision_of(connection) is None:
        raise ConfigError(
            f"The database {shown} is that of another program: it has the table {tables[0]!r} and no schema of Bagua. "
            "Use another database or state folder. [BG817]"
        )


def revision_of(connection: sa.Connection) -> str | None:
    """Returns the revision of the schema; None: there is no schema."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars().all()
    return str(found[0]) if found else None


def _create(connection: sa.Connection) -> None:
    """Gives an empty database the newest schema at once. A test compares it with what the migrations make."""
    models.metadata.create_all(connection)
    connection.execute(sa.text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"))
    connection.execute(sa.text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})
