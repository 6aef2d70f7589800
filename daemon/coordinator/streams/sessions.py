"""Sessions of connected nodes: queues directives for them and routes their replies.

Everything here lives in memory, on the event loop; nothing waits for a slow peer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bagua.base.errors import ConflictError, UnavailableError
from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, Phase
from bagua.daemon.coordinator.streams.directives import Order, concerns, wish
from bagua.proto import node_pb2

MAX_WAITING_DIRECTIVES = 10_000
UPGRADE_S = 300.0  # how long a daemon may take to build its core and to start


@dataclass(eq=False)
class NodeSession:
    """Stream of one daemon."""

    node_id: str
    boot_id: str
    hostname: str
    number: int = 0  # of the stream, among those of this run of its daemon; 0: unknown
    life: int = 0  # of the daemon below its keeper
    unpacks: bool = False  # its daemon takes large directives compressed

    def __post_init__(self) -> None:
        # The newest acknowledgement while its introduction waits for the database; None: it does not wait.
        self.early: asyncio.Queue[node_pb2.HeartbeatAck] | None = None
        self.outgoing: asyncio.Queue[node_pb2.Directive | bytes] = asyncio.Queue(MAX_WAITING_DIRECTIVES)
        self.closed = asyncio.Event()
        self.close_reason = ""
        self.heard = asyncio.Event()  # set at every message
        self.heard_clock = 0.0  # by the service clock
        self.heartbeat_s = 0.0  # that its daemon was told last; 0: that of Welcome
        self.acked_clock = 0.0  # when a heartbeat was acknowledged last
        self._told: dict[str, Order] = {}

    def close(self, reason: str) -> None:
        """Ends the session; the first reason stays."""
        self.close_reason = self.close_reason or reason
        self.closed.set()

    def note_heard(self, now: float) -> None:
        """A message came; ``now`` by the service clock."""
        self.heard_clock = now
        self.heard.set()

    def send(self, directive: node_pb2.Directive | bytes) -> None:
        """Queues a directive. A daemon that does not take them loses its session: it gets all of them again when it
        comes back."""
        try:
            self.outgoing.put_nowait(directive)
        except asyncio.QueueFull:
            self.close(f"{MAX_WAITING_DIRECTIVES} directives wait for this daemon: it does not read its stream")

    def order(self, job_id: str, host: HostRecord, order: Order | None) -> None:
        """Queues what the node should do about a job, unless it was told before. A part that an earlier run of the
        daemon has stopped is over: this run must not begin it again."""
        over = host.phase is Phase.STOPPED and host.boot_id != self.boot_id
        if order is None or over or not concerns(order.wish, host):
            self._told.pop(job_id, None)
        elif self._told.get(job_id) is not order:
            self._told[job_id] = order
            self.send(order.to(host, self.unpacks))


class Upgrades:
    """Upgrades of nodes that are under way: one object for all nodes."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[NodeSession, asyncio.Future[None]]] = {}
        self._next = 1

    async def upgrade(self, session: NodeSession) -> None:
        """Asks the daemon of ``session`` to hand over; returns when its successor has said Hello. Raises ConflictError
        if it refuses, or if the node was restarted meanwhile; UnavailableError if no answer comes within UPGRADE_S."""
        number, self._next = self._next, self._next + 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = session, done
        session.send(node_pb2.Directive(upgrade=node_pb2.Upgrade(request_id=number)))
        try:
            async with asyncio.timeout(UPGRADE_S):
                await done
        except TimeoutError:
            text = f"Node {session.node_id} neither started another daemon nor refused in {UPGRADE_S:g} s: see its log."
            raise UnavailableError(f"{text} [BG802]") from None
        finally:
            del self._waiting[number]

    def introduced(self, session: NodeSession) -> None:
        """Notes that a daemon has said Hello."""
        for former, done in self._of(session.node_id):
            if session.boot_id != former.boot_id:
                text = f"Node {session.node_id} was restarted meanwhile, with its keeper."
                done.set_exception(ConflictError(f"{text} [BG813]"))
            elif session.life > former.life:
                done.set_result(None)

    def refused(self, session: NodeSession, refusal: node_pb2.UpgradeRefusal) -> None:
        """Notes that a daemon refuses, and stays. An answer to a request that nobody waits for changes nothing."""
        former, done = self._waiting.get(refusal.request_id, (None, None))
        if former is not None and done is not None and former.node_id == session.node_id and not done.done():
            text = f"Node {session.node_id} keeps its daemon: {refusal.reason[:2_000]}."
            done.set_exception(ConflictError(f"{text} [BG813]"))

    def _of(self, node_id: str) -> list[tuple[NodeSession, asyncio.Future[None]]]:
        return [one for one in self._waiting.values() if one[0].node_id == node_id and not one[1].done()]


class Sessions:
    """Living sessions by node id."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._sessions: dict[str, NodeSession] = {}
        self._orders: dict[str, Order] = {}  # the last about each job
        self._numbers: dict[str, tuple[str, int]] = {}  # node -> the run of its daemon, its youngest stream
        self._request_numbers = itertools.count(1)
        self._requests: dict[int, tuple[NodeSession, Callable[[Any], None]]] = {}  # that wait for replies
        self._on_change = on_change
        self.ever_connected = False
        self.upgrades = Upgrades()
        self.traces_under_way = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, node_id: str) -> NodeSession | None:
        """The living session of a node."""
        return self._sessions.get(node_id)

    def youngest(self, session: NodeSession) -> bool:
        """Returns False if a younger stream of the same daemon has been here: then ``session`` knows less than that
        one.
        """
        boot_id, number = self._numbers.get(session.node_id, ("", 0))
        return boot_id != session.boot_id or session.number >= number

    def add(self, session: NodeSession) -> None:
        """Makes ``session`` the one of its node; an older one ends."""
        older = self._sessions.get(session.node_id)
        if older is not None:
            older.close("replaced by a newer session of this node")
            self._drop_requests(older)
        self._sessions[session.node_id] = session
        self._numbers[session.node_id] = (session.boot_id, session.number)
        self.ever_connected = True
        self._on_change()

    def remove(self, session: NodeSession) -> bool:
        """Removes a session. False if a newer session has taken its place."""
        self._drop_requests(session)
        if self._sessions.get(session.node_id) is not session:
            return False
        del self._sessions[session.node_id]
        self._on_change()
        return True

    def close_all(self, reason: str) -> None:
        """Ends every session, with words for the daemons."""
        for session in self._sessions.values():
            session.close(reason)

    def put_forward(self, jump: float) -> None:
        """Moves moments of all sessions forward, after the service clock jumped."""
        for session in self._sessions.values():
            session.heard_clock += jump

    def heard(self, node_id: str) -> float | None:
        """Returns when a connected node was heard of last, by the service clock."""
        session = self._sessions.get(node_id)
        return None if session is None else session.heard_clock

    def close_silent(self, now: float, lease_s: float) -> None:
        """Ends the sessions of daemons that have not said anything for a lease. ``now`` by the service clock, which
        does not count a time in which this process stood still: what daemons sent meanwhile lies unread."""
        for session in self._sessions.values():
            if now >= session.heard_clock + lease_s:
                session.close(f"nothing was heard of this daemon for {lease_s:g} s")

    def send(self, job_id: str, hosts: Iterable[HostRecord], order: Order | None) -> None:
        """Passes ``order`` about a job on to these of its parts, as far as they are connected."""
        for host in hosts:
            session = self._sessions.get(host.node_id)
            over = host.index < 0 and host.phase is Phase.STOPPED
            if session is not None and not over and (order is None or order.counts(host)):
                session.order(job_id, host, order)

    def forget(self, job_id: str) -> None:
        self._orders.pop(job_id, None)

    def order(self, job: JobRecord) -> Order | None:
        """The directive for the hosts of ``job`` as it is now. The same object as before if nothing is new."""
        now = wish(job)
        before = self._orders.get(job.job_id)
        if now is None or (job.state.terminal and all(not concerns(now, host) for host in job.parts)):
            self._orders.pop(job.job_id, None)
            return None
        if before is None or before.wish != now:
            self._orders[job.job_id] = before = Order(now, job)
        return before

    # ---- requests that a node answers, with one message or more

    def open_request(self, session: NodeSession, sink: Callable[[Any], None]) -> int:
        """The number of a new request; ``sink`` gets the replies, and None when the session ends."""
        number = next(self._request_numbers)
        self._requests[number] = session, sink
        return number

    def close_request(self, number: int) -> NodeSession | None:
        """Nobody waits for more replies. Returns the session that was asked, if it lives and has not ended it."""
        return self._requests.pop(number, (None, None))[0]

    def route(self, session: NodeSession, number: int, reply: Any) -> None:
        """Passes a reply on. What nobody waits for is dropped."""
        found = self._requests.get(number)
        if found is not None and found[0] is session:
            found[1](reply)

    def _drop_requests(self, session: NodeSession) -> None:
        for number in [number for number, (owner, _) in self._requests.items() if owner is session]:
            self._requests.pop(number)[1](None)
