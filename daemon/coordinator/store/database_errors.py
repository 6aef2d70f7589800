"""Turns database errors into words that name the place and the remedy. Only this module knows the drivers' codes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import sqlalchemy as sa

from bagua.base.errors import ServiceError, UnavailableError

_GOES_ON = "Jobs that run go on, nothing that was acknowledged is lost, and the coordinator goes on by itself."


@dataclass(frozen=True)
class Trouble:
    """``may_pass``: once there is room, or an answer, all goes on by itself; else somebody must mend the database."""

    may_pass: bool
    words: str


@contextmanager
def told_in_words(url: sa.URL) -> Iterator[None]:
    """Raises UnavailableError where an error of the database may pass (no room, no answer), ServiceError where somebody
    must mend it. An error that is this program's own fault passes as it is."""
    try:
        yield
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        found = describe(error, url)
        if found is None:
            raise
        if found.may_pass:
            raise UnavailableError(f"{found.words} {_GOES_ON} [BG816]") from error
        raise ServiceError(f"{found.words} [BG816]") from error


def failure_words(error: Exception) -> str:
    """Words for whoever asked the coordinator for something, for an error of which nobody has thought."""
    what = type(error).__name__
    if isinstance(error, sa.exc.SQLAlchemyError):
        cause = getattr(error, "orig", None) or error
        detail, state = str(cause).partition("\n")[0].strip(), getattr(cause, "sqlstate", None)
        what = f"the database refused a statement ({detail}{f', SQLSTATE {state}' if state else ''})"
    return f"The coordinator failed: {what}. Its log tells more."


def broken_off(error: sa.exc.DBAPIError) -> bool:
    """True if a server undid the transaction because of another one (a deadlock, a conflict): it can be tried again."""
    return getattr(error.orig, "sqlstate", None) in ("40001", "40P01")  # serialization failure, deadlock


def shown_url(url: sa.URL) -> str:
    """Returns the URL as users write it, without the password."""
    return url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)


def describe(error: sa.exc.DBAPIError | sqlite3.Error, url: sa.URL) -> Trouble | None:
    """Words for an error; None: it is not the database's state that is wrong."""
    cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
    detail = " ".join(str(cause).split())
    if url.get_backend_name() == "sqlite":
        code = getattr(cause, "sqlite_errorcode", None)
        # The rest of an extended code tells details.
        return None if code is None else _sqlite(code & 0xFF, detail, _file(url))
    lost = isinstance(error, sa.exc.DBAPIError) and error.connection_invalidated
    # No state: the server was not reached.
    refused = isinstance(error, sa.exc.OperationalError) and not getattr(cause, "sqlstate", None)
    return _postgresql(getattr(cause, "sqlstate", None) or "", lost or refused, detail, url)


def _file(url: sa.URL) -> Path:
    """Returns SQLite's file. Some URLs name it by a URI."""
    name = url.database or ""
    return Path(unquote(name.removeprefix("file:")) if name.startswith("file:") else name).absolute()


def _sqlite(code: int, detail: str, file: Path) -> Trouble | None:
    folder = file.parent
    if code == sqlite3.SQLITE_FULL:
        text = f"The disk of {folder} is full: the database {file.name} there can't be written. Make room."
        return Trouble(True, text)
    if code == sqlite3.SQLITE_IOERR:
        return Trouble(
            True,
            f"The disk of {folder} fails: the database {file.name} there can't be read or written ({detail}). Look at "
            f"the disk, at quotas, and at limits of file sizes.",
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return Trouble(
            True,
            f"The database {file} can't be written ({detail}). The folder {folder} must exist, and user {os.getuid()} "
            f"must be allowed to write it and the files in it.",
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return Trouble(
            False,
            f"The database {file} is damaged ({detail}). Stop the coordinator, then restore a copy, or mend it: "
            f"sqlite3 {file} .recover | sqlite3 mended.db. Or move it away: the next start makes an empty one, and "
            "stops the jobs that still run, for it does not know them.",
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Trouble(
            True, f"The database {file} is locked by another program for too long. Close whatever has it open."
        )
    return None


def _postgresql(state: str, no_answer: bool, detail: str, url: sa.URL) -> Trouble | None:
    shown = shown_url(url)
    if state == "53100":
        return Trouble(True, f"The disk of the database {shown} is full ({detail}). Make room there.")
    if state == "25006":
        return Trouble(True, f"The database {shown} is read-only ({detail}).")
    if state in ("XX001", "XX002"):
        return Trouble(False, f"The database {shown} is damaged ({detail}). Its administrator must mend or restore it.")
    if no_answer or state[:2] in ("08", "53", "57", "58"):  # connection, resources, shutdown, system
        return Trouble(True, f"The database {shown} does not answer ({detail}).")
    return None
