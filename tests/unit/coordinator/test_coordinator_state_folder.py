"""The coordinator's folder when something is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.admin.state_folder import StateFolder


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
