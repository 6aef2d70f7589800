"""Native modules, built or described by a process of its own: building imports torch, the command line never does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bagua.base.errors import BuildError
from bagua.cli.cluster.signals import uninterrupted
from bagua.csrc.build import progress

BUILD_DEADLINE_S = 600.0
DESCRIBE_DEADLINE_S = 60.0
TELL_S = 1.0
_DESCRIBE = "import json; from bagua.csrc.build import describe; print(json.dumps(describe()))"
_BUILD = """
import bagua.csrc.build as builder
try:
    print(builder.build(extension=builder.EXTENSIONS[{kind!r}]))
except builder.BuildError as error:
    raise SystemExit(str(error))
"""


def describe() -> dict[str, str]:
    """Describes what native modules are built of, and which are built (see bagua.csrc.build). Raises BuildError."""
    command = [sys.executable, "-P", "-c", _DESCRIBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DESCRIBE_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    if done.returncode:
        raise BuildError(done.stderr.strip())
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _kill_session(session: int) -> None:
    """Kills a process and all that it started, its leader last. ninja puts compilers into process groups of their own,
    but they stay in the session."""
    for path in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, ProcessLookupError):
            pid = int(path.name)
            if pid != session and os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
    os.kill(session, signal.SIGKILL)


class NativeBuild:
    """A build that runs beside us, of the core unless ``kind`` says another module; over at once if that is built.
    Leaving the context ends it."""

    def __init__(self, kind: str = "core") -> None:
        self._kind = kind

    def __enter__(self) -> NativeBuild:
        try:
            self._begin = time.monotonic()
            with uninterrupted():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BUILD.format(kind=self._kind)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not hasattr(self, "_process"):
            return  # could not even be started
        if self._process.poll() is None:
            _kill_session(self._process.pid)
        self._process.communicate()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, tell: Callable[[str], None] = lambda words: None) -> None:
        """Returns when the module is built; ``tell`` hears every second how far it is. Raises BuildError with the
        builder's words."""
        words = None
        while words is None:
            try:
                _, words = self._process.communicate(timeout=TELL_S)
            except subprocess.TimeoutExpired:
                seconds = time.monotonic() - self._begin
                if seconds > BUILD_DEADLINE_S:
                    raise BuildError(
                        f"Native code was not built within {BUILD_DEADLINE_S:.0f} s. What was compiled is kept: the "
                        "next start goes on there. [BG204]"
                    ) from None
                with contextlib.suppress(RuntimeError, OSError):  # the builder itself tells of such trouble
                    if (found := progress(self._kind)).under_way:
                        tell(found.words(seconds))
        if self._process.returncode:
            raise BuildError(words.strip() or f"The builder ended with exit code {self._process.returncode}.")
