"""Connection from this machine to other hosts: a process of ssh or srun, which its standard input keeps alive."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from threading import Lock, Thread
from typing import IO, Protocol

from bagua.base.errors import ConfigError

END_PATIENCE_S = 20.0  # for what runs on a host to end once it was told to
# For the last lines of a connection that has ended. ssh may leave a process behind that holds its output open, such as
# the master of a shared connection (ControlPersist): it is not waited for.
LAST_OUTPUT_S = 5.0
_SCREEN = Lock()


class Target(Protocol):
    """Receiver of lines."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...


class Remote:
    """A program at the other end. Closing our end ends it. ``login``: where it runs, in words; ``code``: by the shell's
    convention, once it has ended."""

    def __init__(
        self,
        login: str,
        command: Sequence[str],
        order: str = "",
        label: str = "",
        out: Target | None = None,
        err: Target | None = None,
        on_end: Callable[[Remote], None] = lambda _: None,
    ) -> None:
        """Starts the command. ``label`` begins each line of output. ``on_end`` is called in a thread, after the last
        line. Raises ConfigError if there is no such command.
        """
        self.login = login
        try:
            # A session of its own: Ctrl-C reaches only us, and we end what runs there in good order.
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        except OSError as error:
            raise ConfigError(
                f"{command[0]} can't be started: {error.strerror}. Other hosts are reached through it. [BG210]"
            ) from None
        streams = ((self.process.stdout, out or sys.stdout), (self.process.stderr, err or sys.stderr))
        self._copies = [Thread(target=_copy, args=(label, *pair), daemon=True) for pair in streams]
        for copy in self._copies:
            copy.start()
        Thread(target=self._watch, args=(on_end,), daemon=True).start()
        if order:
            self._write(order)

    def _write(self, order: str) -> None:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(order.encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return  # it has ended, and says why

    def _watch(self, on_end: Callable[[Remote], None]) -> None:
        self.wait_output()
        on_end(self)

    def wait_output(self) -> None:
        """Waits until the program has ended, and its last line is written (see ``LAST_OUTPUT_S``)."""
        self.process.wait()
        for copy in self._copies:
            copy.join(LAST_OUTPUT_S)

    def release(self) -> None:
        """Tells the host to end what runs there."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()  # closing sends what was not sent yet
        except BrokenPipeError:
            return

    def end(self, patience_s: float = END_PATIENCE_S) -> None:
        """Waits for its end; cuts the connection if that does not come."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            print(f"{self.login} does not end: the connection is cut.", file=sys.stderr)
            self.process.kill()
        self.wait_output()

    @property
    def code(self) -> int:
        found = self.process.returncode
        return 128 - found if found < 0 else found


def _copy(label: str, source: IO[bytes], target: Target) -> None:
    with source:
        for line in source:
            with _SCREEN:  # lines of several hosts must not mix
                target.write(label + line.decode(errors="replace"))
                target.flush()
