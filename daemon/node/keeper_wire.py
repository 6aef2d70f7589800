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

VERSION = 1
"""Both ends must have the same: a keeper stays while daemons come and go. It covers what notes about jobs contain."""

Message = dict[str, Any]

_LENGTH = struct.Struct("=I")
_READ_BYTES = 1 << 16
_MAX_DESCRIPTORS = 64


class Wire:
    """One end. Nothing here waits: messages that the other end has not read yet are kept until ``flush``."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._out: deque[tuple[bytes, list[int]]] = deque()
        self._in = bytearray()
        self._descriptors: deque[int] = deque()

    def fileno(self) -> int:
        return self._end.fileno()

    @property
    def idle(self) -> bool:
        """True if everything was sent."""
        return not self._out

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Copies of ``descriptors``, at most 64, go with it. Raises OSError if the other end is gone."""
        text = json.dumps({**message, "descriptors": len(descriptors)}).encode()
        self._out.append((_LENGTH.pack(len(text)) + text, [os.dup(number) for number in descriptors]))
        self.flush()

    def flush(self) -> bool:
        """Sends as much as there is room for; True if nothing is left. Raises OSError if the other end is gone."""
        while self._out:
            data, descriptors = self._out[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                sent = self._end.sendmsg([data], rights)
            except BlockingIOError:
                return False
            for number in descriptors:
                os.close(number)
            if sent == len(data):
                self._out.popleft()
            else:
                self._out[0] = (data[sent:], [])
        return True

    def receive(self) -> list[tuple[Message, list[int]]]:
        """Whole messages that have come, each with its descriptors, which are the caller's. Raises EOFError when the
        other end is gone and all was read."""
        found: list[tuple[Message, list[int]]] = []
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._end, _READ_BYTES, _MAX_DESCRIPTORS)
            except BlockingIOError:
                return found
            except ConnectionResetError:
                data, descriptors = b"", []
            self._descriptors.extend(descriptors)
            self._in += data
            found += self._whole()
            if not data:
                if found:
                    return found
                raise EOFError

    def _whole(self) -> list[tuple[Message, list[int]]]:
        found = []
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            end = _LENGTH.size + length
            if len(self._in) < end:
                break
            message: Message = json.loads(self._in[_LENGTH.size : end])
            del self._in[:end]
            found.append((message, [self._descriptors.popleft() for _ in range(message.pop("descriptors"))]))
        return found

    def close(self) -> None:
        """Idempotent."""
        for _, descriptors in self._out:
            for number in descriptors:
                with contextlib.suppress(OSError):
                    os.close(number)
        self._out.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._end.close()
