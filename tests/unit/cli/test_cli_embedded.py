"""The embedded cluster's folders and processes, with programs that play the service."""

import os
import signal
import stat
import time

import pytest

from bagua.base import run_folder
from bagua.base.errors import ConfigError, ServiceError
from bagua.cli.cluster.local_cluster import RunFolder, ServiceProcess


def test_state_folder_is_private_and_goes(tmp_path):
    state = RunFolder(tmp_path)
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    state.remove()
    state.remove()
    assert not list(tmp_path.iterdir())


def test_what_killed_runs_left_is_swept_and_nothing_else(tmp_path):
    old = time.time() - 3600
    for name in ("run-dead", "run-kept", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-kept" / run_folder.KEPT_MARK).touch()
    alive = RunFolder(tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    fresh = tmp_path / "run-fresh"
    fresh.mkdir()
    RunFolder(tmp_path).remove()
    assert {path.name for path in tmp_path.iterdir()} == {"run-kept", "other", "run-fresh", alive.path.name}
    alive.remove()


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Starts a module with the given text as if it were a service; it gets the descriptor's number as ``ready``."""
    started = []
    # Services are started with -P, so that the module must be found by way of the environment.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(text):
        name = f"service_{len(started)}"
        beginning = "import os, sys, time\nready = int(sys.argv[sys.argv.index('--ready-fd') + 1])\n"
        (tmp_path / f"{name}.py").write_text(beginning + text)
        started.append(ServiceProcess("player", name, [], tmp_path / f"{name}.log"))
        return started[-1]

    yield start
    for service in started:
        service.signal_group(signal.SIGKILL)
        service.process.wait(timeout=10)


def soon():
    return time.monotonic() + 10.0


def test_ready_line(play):
    service = play(
        "os.write(ready, b'{\"address\": '); time.sleep(0.1); os.write(ready, b'\"a:1\"}\\n'); time.sleep(60)"
    )
    assert service.wait_ready(soon()) == {"address": "a:1"}
    began = time.monotonic()
    service.signal_group(signal.SIGTERM)
    service.wait(soon())
    assert time.monotonic() - began < 5
    assert "was killed by SIGTERM" in service.describe_end()


def test_a_service_that_ends_without_a_word(play):
    service = play("print('first'); sys.exit('no such luck')")
    with pytest.raises(ServiceError, match=r"ended while it started\. Its last words: no such luck"):
        service.wait_ready(soon())
    assert service.describe_end() == "The player exited with code 1. Its last words: no such luck"
    service.log.unlink()  # on a busy machine a run's folder may go before somebody has heard of the end
    assert service.describe_end() == "The player exited with code 1."


def test_a_service_that_is_never_ready_and_will_not_stop(play):
    service = play("import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)")
    with pytest.raises(ServiceError, match="not ready in time"):
        service.wait_ready(time.monotonic() + 0.5)
    service.signal_group(signal.SIGTERM)
    service.wait(time.monotonic() + 0.2)
    assert service.process.returncode == -signal.SIGKILL


def test_runtime_root_must_be_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_folder.runtime_root() == tmp_path / "bagua"
    (tmp_path / "bagua").rmdir()
    (tmp_path / "bagua").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        run_folder.runtime_root()
