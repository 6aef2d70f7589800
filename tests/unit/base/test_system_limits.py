"""Words for limits of the system."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from bagua.base import system_limits
from bagua.base.system_limits import limit_words, process_words


@pytest.mark.parametrize(("line", "mount"), [("0::/a/b", ""), ("9:pids:/a/b", "pids")], ids=["version 2", "version 1"])
def test_the_control_group_that_is_full_is_named(tmp_path: Path, line: str, mount: str) -> None:
    (tmp_path / "cgroup").write_text(f"7:memory:/else\n{line}\n")
    for name, used, most in (("a", 99, "100"), ("a/b", 5, "max")):
        folder = tmp_path / mount / name
        folder.mkdir(parents=True)
        (folder / "pids.current").write_text(f"{used}\n")
        (folder / "pids.max").write_text(f"{most}\n")
    words = process_words(tmp_path, tmp_path)
    assert "control group /a has 99 of the 100" in words and "TasksMax=" in words


def test_else_the_limit_of_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 400))
    assert "user 1000 may have 400" in process_words(tmp_path, tmp_path)
    assert "kernel.pid_max" in process_words(tmp_path, tmp_path, own=False)  # of a rank, whose user may be another
    monkeypatch.setattr(os, "getuid", lambda: 0)  # whom it does not bind
    assert "kernel.pid_max" in process_words(tmp_path, tmp_path)


def test_last_words_of_ranks_tell_of_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_limits, "process_words", lambda own: "processes")
    monkeypatch.setattr(system_limits, "shared_memory_words", lambda: "shared memory")
    worker = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that …"
    for tail, code, words in (
        ("RuntimeError: can't start new thread", 1, "processes"),
        ("BlockingIOError: [Errno 11] Resource temporarily unavailable", 1, "processes"),
        (worker, 1, "shared memory"),
        ("RuntimeError: unable to write to file </torch_7_1>: No space left on device (28)", 1, "shared memory"),
        ("", -signal.SIGBUS, "shared memory"),
        ("ValueError: x", 1, ""),
        (worker, 0, ""),
    ):
        assert limit_words(tail, code) == words


def test_shared_memory_has_its_size() -> None:
    words = system_limits.shared_memory_words()
    assert "MiB" in words and "--shm-size" in words and "workers" in words
