"""A cache of samples for one host: an SQLite file that its ranks and their workers share.

SQLite in WAL mode gives what is needed without a server and without a package: a write is there whole or not at all,
also after SIGKILL; readers do not wait for writers; the file survives restarts. Files of our own, one for each sample,
would need an index for the bound on their size, and a lock for it.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bagua.base.errors import ConfigError
from bagua.base.paths import cache_dir, make_private_dir
from bagua.torch_api.cache.store import Store, StoreError

WAIT_S = 10.0  # for the locks of other writers
MOST_BYTES = 100 << 30
# SQLite stores the key, the number and lengths beside a value.
ENTRY_BYTES = 128  # of a row beside its value, about
# SQLite limits the variables of a query: older ones take 999.
ASKED = 500  # keys in one query
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, value BLOB NOT NULL)",
    "CREATE TABLE IF NOT EXISTS total (one INTEGER PRIMARY KEY CHECK (one = 1), bytes INTEGER NOT NULL)",
    "INSERT OR IGNORE INTO total VALUES (1, 0)",
)
# Connections of a parent process: SQLite forbids to use them, and to close them, in a forked child.
_INHERITED: list[object] = []


class HostStore(Store):
    """Keeps ``capacity`` bytes at most. Then entries at random make room: samples are used once in an epoch, so that
    the least recently used one would be the next.

    Args:
        folder: By default ``samples`` in the folder of caches (BAGUA_CACHE_DIR, else ~/.cache/bagua). It must lie on
            this host's own disk: SQLite's locks don't work on every network file system.
        capacity: Bytes; by default half of what is free on that disk, 100 GiB at most.

    Threads may share it; a forked child, and a copy by pickle, open the file anew.
    """

    def __init__(self, folder: str | Path | None = None, capacity: int | None = None) -> None:
        """Names the file, which is opened at first use. Raises ValueError for a capacity that is not positive."""
        if capacity is not None and capacity < 1:
            raise ValueError(f"capacity is {capacity}: it must be a positive number of bytes. [BG705]")
        self.folder = Path(folder) if folder is not None else cache_dir() / "samples"
        self._capacity = capacity
        self._local = threading.local()

    def __getstate__(self) -> dict[str, object]:  # a connection can't be pickled, nor used by another process
        return {"folder": self.folder, "_capacity": self._capacity}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _local=threading.local())

    @property
    def path(self) -> Path:
        """File of the store."""
        return self.folder / "samples.sqlite"

    def get(self, key: str) -> bytes | None:
        """Returns the value; None: it was never kept, or had to make room."""
        return self.mget([key])[0]

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Reads values in one query."""
        found: dict[str, bytes] = {}
        with self._used() as connection:
            for begin in range(0, len(keys), ASKED):
                part = keys[begin : begin + ASKED]
                marks = ",".join("?" * len(part))
                found.update(connection.execute(f"SELECT key, value FROM entries WHERE key IN ({marks})", part))
        return [found.get(key) for key in keys]

    def set(self, key: str, value: bytes) -> None:
        """Stores the value, unless it is larger than the capacity."""
        self.mset({key: value})

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        """Writes values in one transaction."""
        with self._used() as connection:
            kept = {key: value for key, value in dictionary.items() if _size(value) <= self._limit()}
            with _transaction(connection):
                # A value that is set again replaces its own bytes in the total.
                self._drop(connection, "key", list(kept))
                self._make_room(connection, sum(map(_size, kept.values())))
                # Several values together may be too large, though each is not: the last ones stay.
                total = _total(connection)
                for key, value in reversed(kept.items()):
                    if total + _size(value) > self._limit():
                        break
                    connection.execute("INSERT INTO entries (key, value) VALUES (?, ?)", (key, value))
                    total += _size(value)
                connection.execute("UPDATE total SET bytes = ?", (total,))

    def num_keys(self) -> int:
        """Returns the number of entries in the file, those of other datasets and processes included."""
        with self._used() as connection:
            (found,) = connection.execute("SELECT count(*) FROM entries").fetchone()
            return int(found)

    def clear(self) -> None:
        """Forgets all entries, and gives their room back to the disk."""
        with self._used() as connection:
            with _transaction(connection):
                connection.execute("DELETE FROM entries")
                connection.execute("UPDATE total SET bytes = 0")
            connection.execute("VACUUM")  # SQLite keeps the room of deleted rows for itself

    def used_bytes(self) -> int:
        """Returns the bytes of all entries together."""
        with self._used() as connection:
            return _total(connection)

    def shutdown(self) -> None:
        """Closes this thread's connection. The file stays."""
        opened = getattr(self._local, "opened", None)
        if opened is not None and opened[0] == os.getpid():  # a connection of a parent must not be closed here
            opened[1].close()
        self._local = threading.local()

    # Room

    def _limit(self) -> int:
        if self._capacity is None:
            # Bytes that the cache holds already are room, too.
            self._capacity = min(MOST_BYTES, (shutil.disk_usage(self.folder).free + self.used_bytes()) // 2)
        return self._capacity

    def _make_room(self, connection: sqlite3.Connection, wanted: int) -> None:
        over = _total(connection) + wanted - self._limit()
        while over > 0:
            lowest, highest = connection.execute("SELECT min(number), max(number) FROM entries").fetchone()
            if lowest is None:  # the file is empty: no entry can make room
                return
            # Numbers have gaps: the next entry is taken.
            query = "SELECT number, length(value) FROM entries WHERE number >= ? ORDER BY number LIMIT 1"
            number, length = connection.execute(query, (random.SystemRandom().randint(lowest, highest),)).fetchone()
            self._drop(connection, "number", [number])
            over -= length + ENTRY_BYTES

    def _drop(self, connection: sqlite3.Connection, column: str, those: Sequence[str | int]) -> None:
        for begin in range(0, len(those), ASKED):
            part = those[begin : begin + ASKED]
            chosen = f"FROM entries WHERE {column} IN ({','.join('?' * len(part))})"
            query = f"SELECT coalesce(sum(length(value) + {ENTRY_BYTES}), 0) {chosen}"
            (freed,) = connection.execute(query, part).fetchone()
            if freed:
                connection.execute(f"DELETE {chosen}", part)
                connection.execute("UPDATE total SET bytes = bytes - ?", (freed,))

    # The file

    @contextmanager
    def _used(self) -> Iterator[sqlite3.Connection]:
        try:
            yield self._connection()
        except sqlite3.Error as error:
            if type(error) is not sqlite3.DatabaseError:  # a subclass, as of a lock or a full disk: the file is good
                raise StoreError(f"The sample cache {self.path} can't be used: {error}. [BG705]") from error
            self._begin_anew()
            raise StoreError(f"The sample cache {self.path} was damaged ({error}): it begins anew. [BG705]") from error
        except (OSError, ConfigError) as error:
            raise StoreError(f"The sample cache {self.path} can't be used: {error} [BG705]") from error

    def _connection(self) -> sqlite3.Connection:
        opened = getattr(self._local, "opened", None)
        if opened is not None and opened[0] == os.getpid():
            found: sqlite3.Connection = opened[1]
            return found
        if opened is not None:
            _INHERITED.append(opened[1])
        make_private_dir(self.folder)
        # Made with its mode before SQLite opens it: SQLite's other files follow it.
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        # None: no transactions that the module begins by itself.
        connection = sqlite3.connect(self.path, timeout=WAIT_S, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # in WAL mode a power cut costs the last writes at most
            # Or the log keeps the largest size that it ever had.
            connection.execute(f"PRAGMA journal_size_limit = {64 << 20}")
            with _transaction(connection):
                for statement in SCHEMA:
                    connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        self._local.opened = os.getpid(), connection
        return connection

    def _begin_anew(self) -> None:
        """Removes a file that is no database, unless another process has done so."""
        self.shutdown()
        with suppress(OSError), open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes must not remove the file that one of them has made anew
            with suppress(sqlite3.DatabaseError):
                connection = sqlite3.connect(self.path, timeout=WAIT_S)
                try:
                    if connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",):
                        return
                finally:
                    connection.close()
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)


def _size(value: bytes) -> int:
    return len(value) + ENTRY_BYTES


def _total(connection: sqlite3.Connection) -> int:
    (found,) = connection.execute("SELECT bytes FROM total").fetchone()
    return int(found)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    # Takes the lock now: SQLite refuses a reader that wants to write later, without waiting.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # the transaction may have ended by itself
            connection.execute("ROLLBACK")
        raise
