"""Copies the output of ranks from pipes to log files, and keeps the end of stderr for error messages."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
from collections import deque
from collections.abc import Callable, Sequence

from bagua.daemon.node.logs.echo import Echo, RankEcho
from bagua.daemon.node.logs.file import LogFile

STDERR_TAIL_BYTES = 64 << 10
ERROR_TAIL_BYTES = 8 << 10
ERROR_TAIL_LINES = 20
_READ_BYTES = 64 << 10
_PIPE_BYTES = 256 << 10
_DRAIN_BYTES = 16 << 20
_TRACEBACK = "Traceback (most recent call last)"
_CRASH = "Fatal Python error: "
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)  # torch's, before each line
_START = re.compile(rf"^(?:\[rank\d+\]: ?)?(?:Traceback \(most|  \+ Exception Group Traceback|{_CRASH})", re.MULTILINE)
_OF_GROUP = re.compile(r"^ *\| (?!Traceback )(\S.*)$", re.MULTILINE)
_FRAME = re.compile(r'^  File ".*$', re.MULTILINE)
MOST_REASON = 2 << 10
ERROR_REASON_LINE = 500


class RankOutput:
    """The pipes behind a rank's stdout and stderr, emptied by the event loop into its log file."""

    def __init__(
        self, log: LogFile, on_trouble: Callable[[str], None], echo: Echo | None = None, rank: int = 0
    ) -> None:
        self.log = log
        self._echoes = [] if echo is None else [RankEcho(echo, rank), RankEcho(echo, rank)]  # of stdout, of stderr
        self._on_trouble = on_trouble
        self._loop = asyncio.get_running_loop()
        self._readers: dict[int, bool] = {}  # descriptor -> is it stderr
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0

    def open(self) -> tuple[int, int]:
        """Opens the ends for the rank's stdout and stderr. The caller closes them once the rank has them."""
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

    @property
    def readers(self) -> list[int]:
        """The daemon's ends: of stdout, then of stderr."""
        return list(self._readers)

    def attach(self, readers: Sequence[int]) -> None:
        """Goes on with pipes whose reading ends are these, of stdout and of stderr."""
        for is_stderr, reader in enumerate(readers):
            self._readers[reader] = bool(is_stderr)
            self._loop.add_reader(reader, self._pump, reader)

    def drain(self) -> None:
        """Takes what is in the pipes now: after the rank's death that is all it wrote."""
        for reader in list(self._readers):
            taken = 0
            # A process that the rank left behind may write on for ever.
            while taken < _DRAIN_BYTES and (count := self._pump(reader)):
                taken += count

    def close(self) -> None:
        """Takes the rest and closes pipes and log: whoever still holds the other ends is not of the job any more."""
        self.drain()
        for reader in list(self._readers):
            self._close_reader(reader)
        self.log.close()

    def error_tail(self, told: str) -> str:
        return error_tail(b"".join(self._tail), told)

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
        if self._echoes:
            self._echoes[self._readers[reader]].add(data)
        if trouble := self.log.write(data):
            self._on_trouble(trouble)
        return len(data)

    def _remember(self, data: bytes) -> None:
        self._tail.append(data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= STDERR_TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft())

    def _close_reader(self, reader: int) -> None:
        if reader not in self._readers:
            return
        is_stderr = self._readers.pop(reader)
        if self._echoes:
            self._echoes[is_stderr].close()
        self._loop.remove_reader(reader)
        os.close(reader)
        if not self._readers:
            self.log.close()


def error_tail(stderr: bytes, told: str = "") -> str:
    """The last words of a failed rank: from its last traceback on, or from that of the exception that it has ``told``;
    else its last 20 lines; at most 8 KiB, cut in the middle."""
    text = stderr[-STDERR_TAIL_BYTES:].decode("utf-8", "replace").rstrip()  # the cut may split a character
    end = text.rfind("\n" + told.splitlines()[0]) if told else -1
    starts = [found.start() for found in _START.finditer(text, 0, end if end >= 0 else len(text))]
    at = starts[-1] if starts else text.rfind(_TRACEBACK)
    if at < 0:
        text = "\n".join(text.splitlines()[-ERROR_TAIL_LINES:])
    else:
        text = text[text.rfind("\n", 0, at) + 1 :]
    if len(text) > ERROR_TAIL_BYTES:
        # Most of it from the end, which says what went wrong.
        text = f"{text[: ERROR_TAIL_BYTES // 4]}\n…\n{text[-ERROR_TAIL_BYTES * 3 // 4 :]}"
    return text


def is_crash(tail: str) -> bool:
    """True if the last words are Python's stack at a crash (faulthandler)."""
    return tail.startswith(_CRASH)


def error_reason(tail: str) -> str:
    """Type and whole message of the exception at the end of these last words, or where a crash was; else the last
    line."""
    text = _PREFIX.sub("", tail)
    if is_crash(text):
        where = _FRAME.search(text)
        return text.partition("\n")[0] + (f", in {where[0].strip()}" if where else "")
    if text.startswith("  + "):
        found = "\n".join(_OF_GROUP.findall(text))
    elif text.startswith(_TRACEBACK):
        lines = text.splitlines()[1:]
        first = next((number for number, line in enumerate(lines) if line[:1].strip()), len(lines))
        found = "\n".join(lines[first:])
    else:
        found = text.rstrip().rpartition("\n")[2].strip()[:ERROR_REASON_LINE]
    return found if len(found) <= MOST_REASON else f"{found[:MOST_REASON]} …"
