"""Connections that have shown no session: few, and not for long. Otherwise silent ones keep browsers out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from bagua.base.address import first_of_crowd, network_of

if TYPE_CHECKING:
    from starlette.datastructures import Address

MOST = 200
PATIENCE_S = 30.0


class Guests:
    """Use from the event loop. ``most`` guests may be connected; for a further one the oldest goes of the network
    that has most of them."""

    def __init__(self, most: int = MOST, patience_s: float = PATIENCE_S) -> None:
        self._most, self._patience_s = most, patience_s
        self._here: dict[tuple[str, int], tuple[asyncio.Transport, asyncio.TimerHandle]] = {}  # by peer, oldest first

    def arrive(self, transport: asyncio.Transport) -> None:
        """Notes a connection. It is broken off if nobody admits it in time."""
        peer = _peer(transport)
        if len(self._here) >= self._most:
            self._end([*self._here][first_of_crowd([network_of(host) for host, _ in self._here])])
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._end, peer)
        self._here[peer] = transport, timer

    def admit(self, peer: Address | tuple[str, int] | None) -> None:
        """Notes that the connection has shown a session, or is over: it is no guest any more."""
        if peer is not None and (found := self._here.pop((peer[0], peer[1]), None)) is not None:
            found[1].cancel()

    def _end(self, peer: tuple[str, int]) -> None:
        transport, timer = self._here.pop(peer)
        timer.cancel()
        transport.abort()

    def protocol(self) -> type[asyncio.Protocol]:
        """uvicorn's protocol, which tells of its connections."""
        guests = self

        class Guarded(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
            def connection_made(self, transport: Any) -> None:
                guests.arrive(transport)
                super().connection_made(transport)

            def connection_lost(self, exc: Exception | None) -> None:
                guests.admit(_peer(self.transport))
                super().connection_lost(exc)

        return Guarded


def _peer(transport: asyncio.Transport) -> tuple[str, int]:
    """The other end as requests name it."""
    found = transport.get_extra_info("peername") or ("", id(transport))  # none if it has been reset already
    return str(found[0]), int(found[1])
