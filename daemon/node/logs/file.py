"""A rank's log file: addresses its bytes by their offset since the rank's start, and rotates.

One event loop writes and hands out positions. Threads read from the disk, so that a reader of a huge log never holds
up the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

READ_BYTES = 64 << 10
_SCAN_BYTES = 256 << 10
# Few on purpose: many readers of huge logs share them, and leave the processor to the ranks.
_readers = ThreadPoolExecutor(2, thread_name_prefix="log-reader")
T = TypeVar("T")


@dataclass(frozen=True)
class LogLimits:
    """Size of one file of a rank's log, and how many there are at most, the one being written included."""

    max_bytes: int = 64 << 20
    files: int = 3


@dataclass(frozen=True)
class Piece:
    """``data`` begins at ``offset``; the ``missing`` bytes before it were asked for too, and are gone."""

    offset: int
    data: bytes
    missing: int = 0

    @property
    def end(self) -> int:
        return self.offset + len(self.data)


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


class LogFile:
    """Bytes that a rank wrote, by offset since its start. The oldest go when there are too many. One event loop, one
    writer."""

    def __init__(self, path: Path, limits: LogLimits | None = None) -> None:
        self.path = path
        self.closed = False
        self._limits = limits or LogLimits()
        self._starts: deque[int] = deque([0])  # offset of the first byte of each file, oldest first
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._end = 0
        self._waiters: set[asyncio.Future[None]] = set()
        self._dropped = 0  # bytes that could not be written since the last that could
        self._trouble = ""

    @classmethod
    def of_the_past(cls, path: Path) -> LogFile:
        """The log of a rank of an earlier life of the daemon, to be read."""
        log = cls.__new__(cls)
        files = [path]
        while (older := _numbered(path, len(files))).exists():
            files.append(older)
        log.path, log.closed, log._limits, log._fd = path, True, LogLimits(), -1
        log._waiters, log._dropped, log._trouble = set(), 0, ""
        log._starts, log._end = deque(), _read_start(path)
        for file in reversed(files):
            log._starts.append(log._end)
            log._end += file.stat().st_size if file.exists() else 0
        return log

    @classmethod
    def again(cls, path: Path, limits: LogLimits) -> LogFile:
        """The log of a rank that an earlier life of the daemon has started, to be written on. Raises OSError."""
        log = cls.of_the_past(path)
        log._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        log._limits, log.closed = limits, False
        return log

    @property
    def start(self) -> int:
        """Offset of the oldest byte that is still there."""
        return self._starts[0]

    @property
    def end(self) -> int:
        """Offset behind the newest byte."""
        return self._end

    # ── writing ──

    def write(self, data: bytes) -> str:
        """Appends; readers that wait go on. A full disk must not stop a rank: bytes are dropped then, the first time
        the reason is returned (else an empty text), and a line in the log counts them once there is room."""
        told = bool(self._dropped)
        if self._dropped:
            line = f"\n[bagua: {self._dropped} bytes of output are missing here: {self._trouble}]\n".encode()
            if not self._append(line):
                self._dropped = 0
        left = len(data) if self._dropped else self._append(data)
        self._dropped += left
        self._wake()
        if told or not left:
            return ""
        return f"output of a rank is lost: {self.path} can't be written: {self._trouble}"

    def _append(self, data: bytes) -> int:
        """Returns how many bytes could not be written."""
        view = memoryview(data)
        try:
            while view:
                room = self._starts[-1] + self._limits.max_bytes - self._end
                if room <= 0:
                    self._rotate()
                    continue
                written = os.write(self._fd, view[:room])
                self._end += written
                view = view[written:]
        except OSError as error:
            self._trouble = error.strerror or str(error)
        return len(view)

    def _rotate(self) -> None:
        # First of all what may fail, on a full disk: until there is room, everything stays as it was.
        fresh = self.path.with_name(f".{self.path.name}.next")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        if len(self._starts) == self._limits.files:
            self._write_start(self._starts[1] if len(self._starts) > 1 else self._end)
        try:
            for number in range(min(len(self._starts), self._limits.files - 1), 0, -1):
                os.replace(_numbered(self.path, number - 1), _numbered(self.path, number))
            os.replace(fresh, self.path)  # not truncated in place: a reader may have the old file open
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._fd)
        self._fd = descriptor
        self._starts.append(self._end)
        while len(self._starts) > self._limits.files:
            self._starts.popleft()

    def _write_start(self, offset: int) -> None:
        """Remembers for a later life of the daemon how much was rotated away."""
        with contextlib.suppress(OSError):
            _start_path(self.path).write_text(str(offset))

    # ── reading ──

    async def read(self, offset: int, limit: int = READ_BYTES) -> Piece:
        """Reads at most ``limit`` bytes from ``offset`` on, or from the next whole line on if older bytes are gone.
        Empty: there are none yet.
        """
        begin = max(offset, self.start)
        while begin < self._end:
            index = self._index(begin)
            file = self._open(index)
            if file is None:  # somebody removed it
                begin = self._starts[index + 1] if index + 1 < len(self._starts) else self._end
                continue
            data = await _off_loop(_read_at, file, begin - self._starts[index], limit)
            if begin > offset:
                cut = data.find(b"\n") + 1
                begin, data = begin + cut, data[cut:]
            return Piece(begin, data, begin - offset)
        return Piece(begin, b"", begin - offset)

    async def tail_offset(self, lines: int) -> int:
        """Returns where the last ``lines`` lines begin; a last line without its end counts. 0: at the rank's start,
        also if the log has fewer lines than that.
        """
        if lines <= 0:
            return 0
        ends = [*list(self._starts)[1:], self._end]
        spans = [
            (file, start, end)
            for index, (start, end) in enumerate(zip(self._starts, ends, strict=True))
            if (file := self._open(index)) is not None
        ]
        return await _off_loop(_find_tail, spans, lines)

    def _index(self, offset: int) -> int:
        return max(i for i, start in enumerate(self._starts) if start <= offset)

    def _open(self, index: int) -> BinaryIO | None:
        """The file that holds a part. Once open, rotation does not touch what is read from it."""
        try:
            return open(_numbered(self.path, len(self._starts) - 1 - index), "rb", buffering=0)
        except OSError:
            return None

    async def changed(self, offset: int) -> None:
        """Returns once there are bytes beyond ``offset``, or no more will come."""
        while self._end <= offset and not self.closed:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def close(self) -> None:
        """Tells readers that no more will be written."""
        if not self.closed:
            self.closed = True
            os.close(self._fd)
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


async def _off_loop(work: Callable[..., T], *arguments: object) -> T:
    """Runs ``work`` in a reader's thread. It runs to its end even if the caller is cancelled: it closes its files."""
    return await asyncio.shield(asyncio.get_running_loop().run_in_executor(_readers, work, *arguments))


def _read_at(file: BinaryIO, position: int, limit: int) -> bytes:
    with file:
        return os.pread(file.fileno(), limit, position)


def _find_tail(spans: Sequence[tuple[BinaryIO, int, int]], lines: int) -> int:
    """Looks for the ``lines``-th last line from the end; ``spans``: files with the offsets of their first and behind
    their last byte. Blocks without it are only counted, which is as fast as memory."""
    try:
        left, last = lines, True
        for file, start, end in reversed(spans):
            position = end
            while position > start:
                begin = max(start, position - _SCAN_BYTES)
                block = os.pread(file.fileno(), position - begin, begin - start)
                if last and block.endswith(b"\n"):  # ends the last line, begins none
                    block = block[:-1]
                last = False
                found = block.count(b"\n")
                if found >= left:
                    return begin + _nth_last_newline(block, left) + 1
                left -= found
                position = begin
        return 0
    finally:
        for file, _, _ in spans:
            file.close()


def _nth_last_newline(block: bytes, count: int) -> int:
    at = len(block)
    for _ in range(count):
        at = block.rfind(b"\n", 0, at)
    return at


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _start_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.start")


def _read_start(path: Path) -> int:
    try:
        return max(0, int(_start_path(path).read_text()))
    except (OSError, ValueError):  # never rotated away, or damaged
        return 0
