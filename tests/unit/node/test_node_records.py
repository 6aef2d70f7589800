"""The journal and the folder for sockets."""

import json
import os
import stat
import tempfile
from pathlib import Path

import pytest
import structlog

from bagua.base.errors import ConfigError
from bagua.daemon.node.host.settings import Settings, open_node_folder
from bagua.daemon.node.jobs.engine_host import WireSettings
from bagua.daemon.node.jobs.journal import JobEntry, Journal
from bagua.daemon.node.ranks import runtime_dir
from bagua.proto import common_pb2, node_pb2


def entry(job_id="j", ended=False, error=""):
    phase = node_pb2.LOCAL_PHASE_STOPPED if ended else node_pb2.LOCAL_PHASE_STARTED
    rank = common_pb2.RankStatus(pid=5, state=common_pb2.RANK_STATE_RUNNING, exited_at=1.5)
    job = node_pb2.LocalJob(job_id=job_id, generation=2**40, phase=phase, ranks=[rank], error=error)
    return JobEntry(job, False, "/s", {5: 6})


def test_the_journal_keeps_jobs(tmp_path):
    journal = Journal(tmp_path)
    journal.write(entry())
    journal.write(entry(error="x", ended=True))
    os.utime(tmp_path / "j.json", (1, 1))
    journal.write(entry(job_id="k"))
    entries, broken = journal.read_all()
    assert entries == [entry(error="x", ended=True), entry(job_id="k")] and not broken
    (tmp_path / "half.json").write_text('{"version": 1, "job_id"')
    (tmp_path / "old.json").write_text('{"version": 1}')
    (tmp_path / "list.json").write_text("[]")
    assert len(journal.read_all()[1]) == 3
    journal.remove("k")
    journal.remove("k")
    assert {path.name for path in tmp_path.iterdir()} == {"j.json", "half.json", "old.json", "list.json"}


def changed(**fields):
    """A journal with other fields; ``job``: fields of its report."""
    good = {"version": 2, "adopt": False, "rank_socket": "/s", "start_times": {"5": 6}}
    return json.dumps(
        {**good, **fields, "job": {"job_id": "j", **fields["job"]} if "job" in fields else {"job_id": "j"}}
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "null",
        '"text"',
        "[[]]",
        "[" * 100_000,
        '{"version": 2}',
        changed(job={"job_id": "../x"}),
        changed(job={"job_id": 5}),
        changed(job={"ranks": [5]}),
        changed(job={"ranks": [{"pid": "one"}]}),
        changed(job={"ranks": [{"pid": -1}]}),
        changed(job={"extra": 1}),
        changed(job={"phase": "yes"}),
        changed(start_times=None),
        changed(start_times={"one": 1}),
    ],
)
def test_a_damaged_journal_is_found_whatever_is_in_it(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    (tmp_path / "y.json").write_bytes(b"\xff\x00" * 10)
    (tmp_path / "z.json").mkdir()
    Journal(tmp_path).write(entry())
    entries, broken = Journal(tmp_path).read_all()
    assert entries == [entry()] and {path.name for path in broken} == {"x.json", "y.json", "z.json"}


def settings(state, node_id=""):
    wire = WireSettings(measure_ring=True, plain_data=False)
    return Settings(
        "h:1", "n", node_id, 1, "127.0.0.1", state, state / "token", None, None, None, None, 1 << 20, 3, wire
    )


@pytest.mark.parametrize("text", ["", "{", "null", "5", '{"node_id": 5}', '{"node_id": "../x"}', "\udcff"])
def test_a_damaged_node_id_is_put_aside(tmp_path, text):
    file = tmp_path / "node-n" / "node.json"
    file.parent.mkdir()
    file.write_bytes(text.encode(errors="surrogateescape"))
    log = structlog.get_logger()
    with structlog.testing.capture_logs() as lines:
        folder = open_node_folder(settings(tmp_path), log)
    os.close(folder.lock)
    assert folder.node_id.startswith("n-") and (file.parent / "node.json.broken").exists()
    assert [line["log_level"] for line in lines] == ["warning"]
    again = open_node_folder(settings(tmp_path), log)
    os.close(again.lock)
    assert again.node_id == folder.node_id
    named = open_node_folder(settings(tmp_path, "mine"), log)
    os.close(named.lock)
    assert named.node_id == "mine"


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
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(ConfigError, match="too long"):
        runtime_dir.socket_folder(long)


def test_a_folder_that_is_a_trap(short_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    (short_path / "elsewhere").mkdir()
    (short_path / "bagua").symlink_to(short_path / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of yours"):
        runtime_dir.socket_folder(short_path / ("x" * 100))
