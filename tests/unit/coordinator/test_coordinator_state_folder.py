"""The coordinator's folder when something is wrong with it."""

import os

import pytest

from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.admin.state_folder import StateFolder
from bagua.daemon.coordinator.store import database
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"coordinator-", b"x" * 1000, b"coordinator-0123\n\nx"])
def test_a_damaged_identity_is_made_anew(tmp_path, content):
    folder = StateFolder(tmp_path)
    (folder.path / "id").write_bytes(content)
    made = folder.identity()
    assert made.startswith("coordinator-") and folder.identity() == made
    assert (folder.path / "id").stat().st_mode & 0o777 == 0o600
    folder.close()


def journal(file):
    return file.with_name(file.name + "-wal")


def without_its_journal(file):
    journal(file).unlink()


def without_its_file(file):
    file.unlink()


def cut(size):
    return lambda file: os.truncate(file, size)


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (cut(0), r"bagua\.db is empty \(0 bytes\)"),
        (cut(1), r"bagua\.db is empty \(1 bytes\)"),
        (without_its_journal, "has no tables: it was cut off or copied without its -wal file"),
        (without_its_file, r"bagua\.db is missing, and its journal bagua\.db-wal is there"),
    ],
)
@pytest.mark.parametrize("form", ["sqlite:///{}", "sqlite:///{}?timeout=5", "sqlite+pysqlite:///{}"])
def test_a_database_that_has_lost_its_content_is_no_new_one(tmp_path, monkeypatch, lose, words, form):
    """Taken for a new one, it would end all jobs."""
    file = tmp_path / "lost" / "bagua.db"
    file.parent.mkdir()
    engine = open_engine(sqlite_url(tmp_path / "bagua.db"))
    for one in (tmp_path / "bagua.db", journal(tmp_path / "bagua.db")):  # as a coordinator that is killed leaves them
        (file.parent / one.name).write_bytes(one.read_bytes())
    engine.dispose()
    lose(file)
    content = {path.name: path.read_bytes() for path in file.parent.iterdir() if path.name != "bagua.db-shm"}
    monkeypatch.setattr(database, "_MADE_S", 0.2)
    with pytest.raises(ConfigError, match=words):
        open_engine(form.format(file))
    found = {path.name: path.read_bytes() for path in file.parent.iterdir()}
    assert lose is without_its_journal or found == content


def test_a_database_that_gets_its_content_at_this_moment_is_waited_for(tmp_path, monkeypatch):
    file = tmp_path / "bagua.db"
    open_engine(sqlite_url(file)).dispose()
    content = file.read_bytes()
    file.write_bytes(b"")
    monkeypatch.setattr(database.time, "sleep", lambda _: file.write_bytes(content))
    open_engine(sqlite_url(file)).dispose()
