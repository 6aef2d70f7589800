"""Messages between the keeper and the daemon: JSON in frames, with descriptors, over a Unix stream socket."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

# Both ends must have the same: a keeper stays while daemons come and go. It covers what notes about jobs contain. Not
# the wire version: a keeper has daemons of several.
VERSION = 3

Message = dict[str, Any]
# A message with its descriptors. None: they are lost, because this process had no room for all of them.
Received = tuple[Message, list[int] | None]

_LENGTH = struct.Struct("=I")
_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 64


class Wire:
    """One end of the connection. Nothing here waits: messages that the other end has not read yet are kept until
    ``flush``.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._out: deque[tuple[bytes, Sequence[int], bool]] = deque()  # the bool: its descriptors are closed when sent
        self._in = bytearray()
        self._batches: deque[list[int]] = deque()  # one for each message with descriptors

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def idle(self) -> bool:
        """True if everything was sent."""
        return not self._out

    def send(self, message: Message, descriptors: Sequence[int] = (), *, lent: bool = False) -> None:
        """Copies of ``descriptors``, at most 64, go with it. ``lent``: the caller keeps them open until they are sent.
        Else they are copied if the message has to wait. Raises OSError if the other end is gone; or, with nothing sent,
        if this process has no room for those copies."""
        text = json.dumps({**message, "descriptors": len(descriptors)}).encode()
        data = _LENGTH.pack(len(text)) + text
        if not self._out:  # then no copy is needed
            sent = self._put(data, descriptors)
            if sent:
                data, descriptors = data[sent:], ()
        if data:
            self._out.append((data, descriptors if lent else _copies(descriptors), not lent))
            self.flush()

    def _put(self, data: bytes, descriptors: Sequence[int]) -> int:
        """Sends what fits, and returns how many bytes were sent. The descriptors go with the first."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            return self._end.sendmsg([data], rights)
        except BlockingIOError:
            return 0

    def flush(self) -> bool:
        """Sends as much as there is room for; True if nothing is left. Raises OSError if the other end is gone."""
        while self._out:
            data, descriptors, owned = self._out[0]
            sent = self._put(data, descriptors)
            if not sent:
                return False
            if owned:
                _close(descriptors)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], (), False)  # the descriptors went with the first bytes
        return True

    def receive(self) -> list[Received]:
        """Whole messages that have come, each with its descriptors, which are the caller's. Raises EOFError when the
        other end is gone and all was read."""
        found: list[Received] = []
        while True:
            try:
                data, descriptors, flags, _ = socket.recv_fds(self._end, _READ_BYTES, _MAX_DESCRIPTORS)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                data, descriptors, flags = b"", [], 0  # as at the end: messages that came whole still count
            for number in descriptors:
                os.set_inheritable(number, False)  # recvmsg() does not, unlike other calls of Python
            if descriptors or flags & socket.MSG_CTRUNC:  # those of one message: the kernel ends a read behind them
                self._batches.append(descriptors)
            self._in += data
            found += self._whole()
            if not data:
                if found:
                    return found
                raise EOFError

    def _whole(self) -> list[Received]:
        found: list[Received] = []
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            end = _LENGTH.size + length
            if len(self._in) < end:
                break
            message: Message = json.loads(self._in[_LENGTH.size : end])
            del self._in[:end]
            found.append((message, self._descriptors_of(message.pop("descriptors"))))
        return found

    def _descriptors_of(self, count: int) -> list[int] | None:
        batch = self._batches.popleft() if count else []
        if len(batch) == count:
            return batch
        _close(batch)
        return None

    def close(self) -> None:
        for _, descriptors, owned in self._out:
            if owned:
                _close(descriptors)
        self._out.clear()
        while self._batches:
            _close(self._batches.popleft())
        self._end.close()


def _copies(descriptors: Sequence[int]) -> list[int]:
    """Duplicates all descriptors, or raises OSError."""
    made: list[int] = []
    try:
        for number in descriptors:
            made.append(os.dup(number))
    except OSError:
        _close(made)
        raise
    return made


def _close(descriptors: Sequence[int]) -> None:
    for number in descriptors:
        with contextlib.suppress(OSError):
            os.close(number)
