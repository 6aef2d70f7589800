"""Upgrades of node daemons: one is asked to hand over to the version that is installed now, and answers by a refusal,
or its successor by Hello.

Everything here lives in memory, on the event loop.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from bagua.base.errors import ConflictError, UnavailableError
from bagua.proto import node_pb2

UPGRADE_S = 300.0  # how long a daemon may take to build its core and to start


class Connected(Protocol):
    """A daemon that is connected: ``NodeSession``."""

    node_id: str
    boot_id: str
    life: int

    def tell(self, directive: node_pb2.Directive) -> None: ...


class Upgrades:
    """Upgrades of nodes that are under way: one object for all nodes."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Connected, asyncio.Future[None]]] = {}
        self._next = 1

    async def upgrade(self, session: Connected) -> None:
        """Asks the daemon of ``session`` to hand over; returns when its successor has said Hello. Raises ConflictError
        if it refuses, or if the node was restarted meanwhile; UnavailableError if no answer comes within UPGRADE_S."""
        number, self._next = self._next, self._next + 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = session, done
        session.tell(node_pb2.Directive(upgrade=node_pb2.Upgrade(request_id=number)))
        try:
            async with asyncio.timeout(UPGRADE_S):
                await done
        except TimeoutError:
            text = f"Node {session.node_id} neither started another daemon nor refused in {UPGRADE_S:g} s: see its log."
            raise UnavailableError(f"{text} [BG802]") from None
        finally:
            del self._waiting[number]

    def introduced(self, session: Connected) -> None:
        """Notes that a daemon has said Hello."""
        for former, done in self._of(session.node_id):
            if session.boot_id != former.boot_id:
                text = f"Node {session.node_id} was restarted meanwhile, with its keeper."
                done.set_exception(ConflictError(f"{text} [BG813]"))
            elif session.life > former.life:
                done.set_result(None)

    def refused(self, session: Connected, refusal: node_pb2.UpgradeRefusal) -> None:
        """Notes that a daemon refuses, and stays. An answer to a request that nobody waits for changes nothing."""
        former, done = self._waiting.get(refusal.request_id, (None, None))
        if former is not None and done is not None and former.node_id == session.node_id and not done.done():
            text = f"Node {session.node_id} keeps its daemon: {refusal.reason[:2_000]}."
            done.set_exception(ConflictError(f"{text} [BG813]"))

    def _of(self, node_id: str) -> list[tuple[Connected, asyncio.Future[None]]]:
        return [one for one in self._waiting.values() if one[0].node_id == node_id and not one[1].done()]
