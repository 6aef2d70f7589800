"""The coordinator's folder when something is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.admin.state_folder import StateFolder
from bagua.daemon.coordinator.store import database
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"coordinator-", b"x" * 1000, b"coordinator-0123\n\nx"])
def test_a_damaged_identity_is_made_anew(tmp_path: Path, content: bytes):
    folder = StateFolder(tmp_path)
    (folder.path / "id").write_bytes(content)
    made = folder.identity()
    assert made.startswith("coordinator-") and folder.identity() == made
    assert (folder.path / "id").stat().st_mode & 0o777 == 0o600
    folder.close()


@pytest.mark.parametrize("name", ["id", "lock", "coordinator.json"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path, name: str):
    (tmp_path / "coordinator" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"coordinator/{name} can't be used: Is a directory"):
        folder = StateFolder(tmp_path)
        folder.identity()
        folder.publish(address="h:1")


def test_a_database_that_has_lost_its_content_is_no_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken for a new one, it would end all jobs. One that a coordinator beside this one has just made gets content."""
    file = tmp_path / "bagua.db"
    open_engine(sqlite_url(file)).dispose()
    content = file.read_bytes()
    file.write_bytes(b"")
    monkeypatch.setattr(database, "_MADE_S", 0.2)
    with pytest.raises(ConfigError, match=r"bagua\.db is empty \(0 bytes\).*\[BG816\]"):
        open_engine(sqlite_url(file))
    assert file.read_bytes() == b""
    monkeypatch.setattr(database.time, "sleep", lambda _: file.write_bytes(content))
    open_engine(sqlite_url(file)).dispose()
