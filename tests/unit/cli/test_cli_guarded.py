"""Errors of the command line that are told in a line, and faults of ours that are not."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from bagua.cli.main import guarded


def failing(code, path):
    def program():
        raise OSError(code, os.strerror(code), path)

    return program


@pytest.fixture(autouse=True)
def as_before():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_file_that_can_not_be_written_is_named(code, capsys):
    with pytest.raises(SystemExit) as end:
        guarded(failing(code, "/closed/trace.json"))
    assert end.value.code == 1 and "/closed/trace.json" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "path"), [(errno.EPERM, None), (errno.EBADF, "/a/file")])
def test_other_errors_of_the_system_are_faults(code, path):
    with pytest.raises(OSError, match=r"permitted|descriptor"):
        guarded(failing(code, path))


def run(shell, program, **environment):
    """``program`` below ``guarded``, with the redirections of ``shell``."""
    code = f"import sys; from bagua.cli.main import guarded; guarded(lambda: {program})"
    return subprocess.run(
        ["bash", "-c", f'exec {shell}; exec "$@"', "bash", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )


def test_output_that_can_not_be_written_is_named():
    done = run(">/dev/full", "print('x', flush=True)")
    assert done.returncode == 1
    assert done.stderr.startswith("error: What this command writes has no room (No space left on device)")
    assert "[BG109]" in done.stderr and "Traceback" not in done.stderr


def test_closed_streams_lead_nowhere():
    """The next file that is opened must not take their place: a socket, say, would get what is printed."""
    said = "print('x', flush=True), print('y', file=sys.stderr)"
    done = run("<&- >&- 2>&-", f"({said}, sys.exit(open('/dev/zero').fileno()))")
    assert done.returncode == 3
