"""An address that moves from one coordinator to another one, as a virtual IP address does: a relay on loopback.

Thread safety: any thread may call ``move`` and ``close``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading

from bagua.base.address import join_address, split_address

_LOOPBACK = "127.0.0.1"
_CHUNK = 1 << 16
_CLOSE_S = 30.0


class Relay:
    """Listens from its construction on. ``address``: constant. Nobody is behind it before the first ``move``."""

    def __init__(self) -> None:
        self._target = ""
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, _LOOPBACK, 0))
        self.address = join_address(*self._server.sockets[0].getsockname()[:2])
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    def move(self, target: str) -> None:
        """New connections go to that address; those that there are end, if it is another one than before."""
        self._loop.call_soon_threadsafe(self._move, target)

    def close(self) -> None:
        """Ends all connections. Idempotent. Raises TimeoutError if one does not end."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        self._server.close()
        self._move("")
        await asyncio.gather(*self._serving)

    def _move(self, target: str) -> None:
        if target != self._target:
            self._target = target
            for writer in self._writers:
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            with contextlib.suppress(OSError):  # either end is gone
                # Nobody listens at port 0: refused at once.
                far, other = await asyncio.open_connection(*split_address(self._target or f"{_LOOPBACK}:0"))
                self._writers.add(other)
                await asyncio.gather(_copy(reader, other), _copy(far, writer))
        finally:
            for one in (writer, other):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(_CHUNK):
        target.write(data)
        await target.drain()
    raise ConnectionResetError("the other end has hung up")  # ends the copying the other way, too
