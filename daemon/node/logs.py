"""Output of ranks: a file with rotation that many readers may follow, and the last of stderr for error messages."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STDERR_TAIL_BYTES = 64 << 10
ERROR_TAIL_BYTES = 8 << 10
ERROR_TAIL_LINES = 20
_READ_BYTES = 64 << 10
_PIPE_BYTES = 256 << 10
_DRAIN_BYTES = 16 << 20
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class LogLimits:
    """Size of one file of a rank's log, and how many there are at most, the one being written included."""

    max_bytes: int = 64 << 20
    files: int = 3


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
        self._broken = ""

    @classmethod
    def of_the_past(cls, path: Path) -> LogFile:
        """The log of a rank of an earlier life of the daemon, to be read. Offsets begin at the oldest byte that is
        left."""
        log = cls.__new__(cls)
        files = [path]
        while (older := _numbered(path, len(files))).exists():
            files.append(older)
        log.path, log.closed, log._limits, log._fd = path, True, LogLimits(), -1
        log._waiters, log._broken, log._end = set(), "", 0
        log._starts = deque()
        for file in reversed(files):
            log._starts.append(log._end)
            log._end += file.stat().st_size if file.exists() else 0
        return log

    @property
    def start(self) -> int:
        """Offset of the oldest byte that is still there."""
        return self._starts[0]

    @property
    def end(self) -> int:
        """Offset behind the newest byte."""
        return self._end

    def write(self, data: bytes) -> str:
        """Appends; readers that wait go on. A full disk must not stop a rank: the bytes are dropped, and the first
        time the reason is returned (else an empty text)."""
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
            first = not self._broken
            self._broken = f"output of a rank is lost: {self.path} can't be written: {error.strerror}"
            return self._broken if first else ""
        finally:
            self._wake()
        return ""

    def read(self, offset: int, limit: int = _READ_BYTES) -> tuple[int, bytes]:
        """(offset of the first byte, at most ``limit`` bytes); the offset is a later one where older bytes are gone.
        Blocks on the disk."""
        offset = max(offset, self.start)
        if offset >= self._end:
            return offset, b""
        index = max(i for i, start in enumerate(self._starts) if start <= offset)
        path = _numbered(self.path, len(self._starts) - 1 - index)
        try:
            with open(path, "rb") as file:
                file.seek(offset - self._starts[index])
                return offset, file.read(limit)
        except OSError:  # somebody removed the file
            return self._end, b""

    def tail_offset(self, lines: int) -> int:
        """Where the last ``lines`` lines begin; 0 lines: the oldest byte. A last line without its end counts."""
        if lines <= 0:
            return self.start
        wanted, position = lines, self._end
        while position > self.start:
            begin = max(self.start, position - _READ_BYTES)
            block = self._read_all(begin, position)
            at = len(block) - 1 if position == self._end and block.endswith(b"\n") else len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                wanted -= 1
                if wanted == 0:
                    return begin + at + 1
            position = begin
        return self.start

    def _read_all(self, begin: int, end: int) -> bytes:
        """The bytes from ``begin`` to ``end``, whichever files they lie in."""
        blocks, position = [], begin
        while position < end:
            position, block = self.read(position, end - position)
            if not block:
                break
            blocks.append(block)
            position += len(block)
        return b"".join(blocks)

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
        """No more will be written; readers learn it."""
        if not self.closed:
            self.closed = True
            os.close(self._fd)
            self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _rotate(self) -> None:
        for number in range(min(len(self._starts), self._limits.files - 1), 0, -1):
            os.replace(_numbered(self.path, number - 1), _numbered(self.path, number))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        os.close(self._fd)
        self._fd = descriptor
        self._starts.append(self._end)
        while len(self._starts) > self._limits.files:
            self._starts.popleft()


class RankOutput:
    """The pipes behind a rank's stdout and stderr, emptied by the event loop into its log file."""

    def __init__(self, log: LogFile, on_trouble: Callable[[str], None]) -> None:
        self.log = log
        self._on_trouble = on_trouble
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, bool] = {}  # descriptor -> is it stderr
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def open(self) -> tuple[int, int]:
        """The ends for the rank's stdout and stderr. The caller closes them once the rank has them."""
        ends = []
        for is_stderr in (False, True):
            reader, writer = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reader, False)
            with contextlib.suppress(OSError):  # more is a courtesy of the kernel
                fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            self._readers[reader] = is_stderr
            self._loop.add_reader(reader, self._pump, reader)
            ends.append(writer)
        return ends[0], ends[1]

    def drain(self) -> None:
        """Takes what is in the pipes now: after the rank's death that is all it wrote."""
        for reader in list(self._readers):
            taken = 0
            while taken < _DRAIN_BYTES and (count := self._pump(reader)):
                taken += count

    def close(self) -> None:
        """Takes the rest and closes pipes and log: whoever still holds the other ends is not of the job any more."""
        self.drain()
        for reader in list(self._readers):
            self._close_reader(reader)
        self.log.close()

    def error_tail(self) -> str:
        """See :func:`error_tail`."""
        return error_tail(b"".join(self._tail))

    def _pump(self, reader: int) -> int:
        """Moves one block; returns its size, 0 at the end or when there is none."""
        try:
            data = os.read(reader, _READ_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self._close_reader(reader)
            return 0
        if self._readers[reader]:
            self._remember(data)
        if trouble := self.log.write(data):
            self._on_trouble(trouble)
        return len(data)

    def _remember(self, data: bytes) -> None:
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= STDERR_TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def _close_reader(self, reader: int) -> None:
        if self._readers.pop(reader, None) is None:
            return
        self._loop.remove_reader(reader)
        os.close(reader)
        if not self._readers:
            self.log.close()


def error_tail(stderr: bytes) -> str:
    """What a failed rank said last: from its last traceback on, else its last 20 lines; at most 8 KiB, cut in the
    middle."""
    text = stderr[-STDERR_TAIL_BYTES:].decode("utf-8", "replace").rstrip()
    at = text.rfind(_TRACEBACK)
    if at < 0:
        text = "\n".join(text.splitlines()[-ERROR_TAIL_LINES:])
    else:
        text = text[text.rfind("\n", 0, at) + 1 :]
    if len(text) > ERROR_TAIL_BYTES:
        text = f"{text[: ERROR_TAIL_BYTES // 4]}\n…\n{text[-ERROR_TAIL_BYTES * 3 // 4 :]}"
    return text


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path
