"""The native core, built or described by a process of its own: building imports torch, the command line never does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from bagua.base.errors import BuildError
from bagua.cli.signals import uninterrupted

BUILD_DEADLINE_S = 600.0
DESCRIBE_DEADLINE_S = 60.0
_DESCRIBE = "import json; from bagua.csrc.build import describe; print(json.dumps(describe()))"
_BUILD = """
import bagua.csrc.build as builder
try:
    print(builder.build())
except builder.BuildError as error:
    raise SystemExit(str(error))
"""


def describe() -> dict[str, str]:
    """Describes the build of the core: its key, and whether it is built (see bagua.csrc.build). Raises BuildError."""
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


class CoreBuild:
    """A build of the core that runs beside us; over at once if the core is built. Leaving the context ends it."""

    def __enter__(self) -> CoreBuild:
        try:
            with uninterrupted():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BUILD],
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

    def wait(self) -> None:
        """Returns when the core is built. Raises BuildError with the builder's words."""
        try:
            _, words = self._process.communicate(timeout=BUILD_DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise BuildError(f"The native core was not built within {BUILD_DEADLINE_S:.0f} s. [BG204]") from None
        if self._process.returncode:
            raise BuildError(words.strip() or f"The builder ended with exit code {self._process.returncode}.")
