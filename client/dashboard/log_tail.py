"""The output of ranks for one tab, as it comes, without more of it in memory than the tab takes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from bagua.base.errors import BaguaError
from bagua.client import Client
from bagua.client.lines import LineAssembler, missing_text


class LogTail:
    """Follows the output of ranks for one tab. ``pop_lines`` gives what has come since; what is too much is left
    out and counted."""

    MOST = 1_000  # lines that wait for the tab
    WIDEST = 2_000  # characters of a line

    def __init__(self, connect: Callable[[], Client], job_id: str, ranks: tuple[int, ...], tail: int) -> None:
        self._client = connect()
        self._job_id, self._ranks, self._tail = job_id, ranks, tail
        self._lock = threading.Lock()
        self._lines: deque[tuple[int, str]] = deque()
        self._skipped = 0
        self.ended = ""  # why nothing more comes; empty: it goes on
        threading.Thread(target=self._read, daemon=True, name=f"dashboard log {job_id}").start()

    def close(self) -> None:
        """Ends the call that reads the log."""
        self._client.close()

    def pop_lines(self, most: int = 300) -> tuple[list[tuple[int, str]], int]:
        """Returns (lines of ranks, number of lines left out before them)."""
        with self._lock:
            count = min(most, len(self._lines))
            lines = [self._lines.popleft() for _ in range(count)]
            skipped, self._skipped = self._skipped, 0
        return lines, skipped

    def _read(self) -> None:
        assemblers: dict[int, LineAssembler] = {}
        try:
            for chunk in self._client.logs(self._job_id, self._ranks, follow=True, tail=self._tail):
                assembler = assemblers.setdefault(chunk.rank, LineAssembler())
                if chunk.error:
                    self._put(chunk.rank, [f"[the output can't be read: {chunk.error}]"])
                if chunk.missing:
                    self._put(chunk.rank, [f"[{missing_text(chunk.rank, chunk.missing)}]"])
                lines = assembler.feed(chunk.data, time.monotonic())
                self._put(chunk.rank, lines + (assembler.finish() if chunk.eof else []))
            self.ended = "end"
        except BaguaError as error:
            self.ended = str(error)

    def _put(self, rank: int, lines: list[str]) -> None:
        with self._lock:
            self._lines.extend((rank, line[: self.WIDEST]) for line in lines)
            while len(self._lines) > self.MOST:
                self._lines.popleft()
                self._skipped += 1
