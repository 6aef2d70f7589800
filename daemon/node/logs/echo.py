"""Writes the output of ranks to the daemon's own stdout, too, for those who read the logs of its container."""

from __future__ import annotations

import queue
import threading

_MOST_WAITING = 8 << 20  # beyond it lines are left out: whoever reads stdout too slowly must not hold up the ranks
_MOST_LINE = 64 << 10


class Echo:
    """Lines of all ranks of a daemon, on their way to one descriptor. A thread writes, as stdout may block."""

    def __init__(self, descriptor: int = 1) -> None:
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lost = 0
        self._taken = self._written = 0  # bytes; each is changed by one thread alone
        self._out = open(descriptor, "wb", buffering=0, closefd=False)
        # A stdout that blocks must not hold up the end.
        self._thread = threading.Thread(target=self._write, name="echo", daemon=True)
        self._thread.start()

    def add(self, lines: bytes) -> None:
        """Takes whole lines; from the event loop alone."""
        if self._taken - self._written > _MOST_WAITING:
            self._lost += len(lines)
            return
        if self._lost:
            lines = b"[bagua: %d bytes of output are missing here; `bagua job logs` has them]\n" % self._lost + lines
            self._lost = 0
        self._taken += len(lines)
        self._lines.put(lines)

    def close(self, within_s: float) -> None:
        """Waits until all is written, for so long."""
        self._lines.put(None)
        self._thread.join(within_s)

    def _write(self) -> None:
        while (lines := self._lines.get()) is not None:
            rest = memoryview(lines)
            try:
                while rest:
                    rest = rest[self._out.write(rest) or 0 :]  # without a buffer it may take a part alone
            except OSError:  # nobody reads any more; the logs of ranks have it all
                return
            self._written += len(lines)


class RankEcho:
    """The stdout or stderr of one rank: makes lines of its pieces, each of which says whose it is."""

    def __init__(self, echo: Echo, rank: int) -> None:
        self._echo = echo
        self._prefix = b"[rank %d] " % rank
        self._begun = b""

    def add(self, data: bytes) -> None:
        """Takes what the rank wrote; a line without its end waits for it."""
        *whole, self._begun = (self._begun + data).split(b"\n")
        if len(self._begun) > _MOST_LINE:
            whole, self._begun = [*whole, self._begun], b""
        if whole:
            self._echo.add(b"".join(self._prefix + line + b"\n" for line in whole))

    def close(self) -> None:
        """Passes on a last line that has no end."""
        if self._begun:
            self.add(b"\n")
