"""Errors of the command line that are told in a line, and faults of ours that are not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from bagua.cli.main import guarded
from bagua.proto import common_pb2


def failing(code: int, path: str | None) -> Callable[[], None]:
    def program() -> None:
        raise OSError(code, os.strerror(code), path)

    return program


@pytest.fixture(autouse=True)
def as_before() -> object:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_file_that_can_not_be_written_is_named(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        guarded(failing(code, "/closed/trace.json"))
    assert end.value.code == 1 and "/closed/trace.json" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "path"), [(errno.EPERM, None), (errno.EBADF, "/a/file")])
def test_other_errors_of_the_system_are_faults(code: int, path: str | None) -> None:
    with pytest.raises(OSError, match=r"permitted|descriptor"):
        guarded(failing(code, path))


def run(shell: str, program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``program`` below ``guarded``, with the redirections of ``shell``."""
    code = f"import sys; from bagua.cli.main import guarded; guarded(lambda: {program})"
    return subprocess.run(
        ["bash", "-c", f'exec {shell}; exec "$@"', "bash", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_output_that_can_not_be_written_is_named() -> None:
    done = run(">/dev/full", "print('x', flush=True)")
    assert done.returncode == 1
    assert done.stderr.startswith("error: What this command writes has no room (No space left on device)")
    assert "[BG109]" in done.stderr and "Traceback" not in done.stderr


def test_closed_streams_lead_nowhere() -> None:
    """The next file that is opened must not take their place: a socket, say, would get what is printed."""
    said = "print('x', flush=True), print('y', file=sys.stderr)"
    done = run("<&- >&- 2>&-", f"({said}, sys.exit(open('/dev/zero').fileno()))")
    assert done.returncode == 3


def test_characters_that_the_output_does_not_have() -> None:
    done = run("2>&1", "print('…', flush=True)", PYTHONIOENCODING="ascii:strict")
    assert (done.stdout, done.returncode) == ("\\u2026\n", 0)


def test_text_that_is_not_utf8_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        guarded(lambda: common_pb2.JobSpec(name="a\udcff") and None)
    told = capsys.readouterr().err
    assert end.value.code == 2 and "'a\\udcff' is not UTF-8 text" in told and "[BG102]" in told
