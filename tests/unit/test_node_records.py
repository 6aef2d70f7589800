"""The journal and the folder for sockets."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from bagua.base.errors import ConfigError
from bagua.daemon.node import runtime_dir
from bagua.daemon.node.journal import JobEntry, Journal, RankEntry


def entry(**changes):
    fields = {"job_id": "j", "generation": 2, "adopt": False, "rank_socket": "/s", "ranks": (RankEntry(0, 0, 5, 6),)}
    return JobEntry(**(fields | changes))


def test_the_journal_keeps_jobs(tmp_path):
    journal = Journal(tmp_path)
    journal.write(entry())
    journal.write(entry(error="x", ended=True))
    os.utime(tmp_path / "j.json", (1, 1))
    journal.write(entry(job_id="k"))
    entries, broken = journal.read_all()
    assert entries == [entry(error="x", ended=True), entry(job_id="k")] and not broken
    (tmp_path / "half.json").write_text('{"version": 1, "job_id"')
    (tmp_path / "new.json").write_text('{"version": 2}')
    (tmp_path / "list.json").write_text("[]")
    assert len(journal.read_all()[1]) == 3
    journal.remove("k")
    journal.remove("k")
    assert {path.name for path in tmp_path.iterdir()} == {"j.json", "half.json", "new.json", "list.json"}


@pytest.fixture
def short_path():
    """pytest's own folders have long names."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_sockets_lie_where_their_paths_are_short(short_path, monkeypatch):
    assert runtime_dir.socket_folder(short_path) == short_path
    long = short_path / ("x" * 100)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    folder = runtime_dir.socket_folder(long)
    assert folder.parent == short_path / "bagua" and runtime_dir.socket_folder(long) == folder
    assert stat.S_IMODE(folder.stat().st_mode) == stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert len(str(runtime_dir.data_socket(folder, "j" * 128, 1))) <= runtime_dir.MAX_SOCKET_PATH
    folder.parent.chmod(0o777)
    runtime_dir.socket_folder(long)
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(ConfigError, match="too long"):
        runtime_dir.socket_folder(long)


def test_a_folder_that_is_a_trap(short_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    (short_path / "elsewhere").mkdir()
    (short_path / "bagua").symlink_to(short_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of yours"):
        runtime_dir.socket_folder(short_path / ("x" * 100))
