"""Errors of the command line that are told in a line, and faults of ours that are not."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable

import pytest

from bagua.cli.main import guarded


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
