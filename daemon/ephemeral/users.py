"""The processes that use an ephemeral cluster: each has a socket to it, which the kernel closes with the process.

A forked child closes its copy (``torch_api/job/lifeline.py``). A program that a process becomes or starts has none.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from bagua.base import parent_socket
from bagua.base.errors import BaguaError

Answer = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class Users:
    """``answer`` makes the reply to each message; an empty one is not sent. Made with the event loop running."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._connected = 0
        self._gone = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, user: socket.socket) -> None:
        """Serves this process until it ends."""
        user.setblocking(False)
        self._connected += 1
        self._spawn(self._serve(user))

    def listen(self, path: Path) -> None:
        """Takes others that connect to ``path``, in a folder of this user alone. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # not SOCK_STREAM: a packet is a message
        listener.setblocking(False)
        listener.bind(str(path))
        listener.listen(128)
        self._spawn(self._accept(listener, path))

    async def gone(self) -> None:
        """Returns when the last one has gone."""
        await self._gone.wait()

    async def close(self) -> None:
        """Closes the connections to all users."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # the event loop itself refers to tasks weakly
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket, path: Path) -> None:
        loop = asyncio.get_running_loop()
        try:
            with listener:
                while True:
                    user, _ = await loop.sock_accept(listener)
                    self.add(user)
        finally:
            path.unlink(missing_ok=True)

    async def _serve(self, user: socket.socket) -> None:
        try:
            with user:
                while (message := await _receive(user)) is not None:
                    if reply := await self._reply(message):
                        await send(user, reply)
        except (KeyError, TypeError, ValueError):
            pass  # nothing that one of ours says: it is hung up on
        finally:
            self._connected -= 1
            if not self._connected:
                self._gone.set()

    async def _reply(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._answer(message)
        except BaguaError as error:
            return {"error": str(error)}


async def send(user: socket.socket, message: dict[str, Any]) -> None:
    """Sends a message, unless the other end has gone."""
    try:
        await asyncio.get_running_loop().sock_sendall(user, json.dumps(message).encode())
    except OSError:
        return


async def _receive(user: socket.socket) -> dict[str, Any] | None:
    """The next message; None when the process has gone, or says what none of ours does."""
    try:
        data = await asyncio.get_running_loop().sock_recv(user, parent_socket.MAX_BYTES)
        message = json.loads(data) if data else None
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None
