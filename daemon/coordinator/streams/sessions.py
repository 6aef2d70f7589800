"""Sessions of connected nodes: queues directives for them and routes their log replies.

Everything here lives in memory, on the event loop; nothing waits for a slow peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, Phase
from bagua.daemon.coordinator.rules.upgrades import Upgrades
from bagua.daemon.coordinator.streams.directives import Order, concerns, wish
from bagua.daemon.coordinator.streams.traces import Traces
from bagua.proto import common_pb2, node_pb2

MAX_WAITING_DIRECTIVES = 10_000


class NodeSession:
    """Stream of one daemon."""

    def __init__(
        self, node_id: str, boot_id: str, hostname: str, number: int = 0, life: int = 0, unpacks: bool = False
    ) -> None:
        self.node_id = node_id
        self.boot_id = boot_id
        self.hostname = hostname
        self.unpacks = unpacks  # its daemon takes large directives compressed
        self.life = life  # of the daemon below its keeper
        self.number = number  # of the stream, among those of this run of its daemon; 0: unknown
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

    def tell(self, directive: node_pb2.Directive | bytes) -> None:
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
            self.tell(order.to(host, self.unpacks))


class Sessions:
    """Living sessions by node id."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._sessions: dict[str, NodeSession] = {}
        self._orders: dict[str, Order] = {}  # the last about each job
        self._numbers: dict[str, tuple[str, int]] = {}  # node -> the run of its daemon, its youngest stream
        self._log_sinks: dict[int, tuple[NodeSession, Callable[[common_pb2.LogChunk | None], None]]] = {}
        self._next_request = 1
        self._on_change = on_change
        self.ever_connected = False
        self.upgrades = Upgrades()
        self.traces = Traces()

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
            self._drop_logs(older)
        self._sessions[session.node_id] = session
        self._numbers[session.node_id] = (session.boot_id, session.number)
        self.ever_connected = True
        self._on_change()

    def remove(self, session: NodeSession) -> bool:
        """Removes a session. False if a newer session has taken its place."""
        self._drop_logs(session)
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

    def tell(self, job_id: str, hosts: Iterable[HostRecord], order: Order | None) -> None:
        """Passes ``order`` about a job on to these of its parts, as far as they are connected."""
        for host in hosts:
            session = self._sessions.get(host.node_id)
            over = host.index < 0 and host.phase is Phase.STOPPED
            if session is not None and not over and (order is None or order.counts(host)):
                session.order(job_id, host, order)

    def forget(self, job_id: str) -> None:
        """Forgets a job that is no more."""
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

    # ---- logs

    def open_log(
        self, node_id: str, read: node_pb2.ReadLog, sink: Callable[[common_pb2.LogChunk | None], None]
    ) -> int | None:
        """Asks a node for a log; ``sink`` gets the chunks, and None when the session ends. None: not connected."""
        session = self._sessions.get(node_id)
        if session is None:
            return None
        request_id = self._next_request
        self._next_request += 1
        self._log_sinks[request_id] = (session, sink)
        read.request_id = request_id
        session.tell(node_pb2.Directive(read_log=read))
        return request_id

    def end_log(self, request_id: int) -> None:
        """The reader went away, or waits."""
        found = self._log_sinks.pop(request_id, None)
        if found is not None:
            found[0].tell(node_pb2.Directive(end_log=node_pb2.EndLog(request_id=request_id)))

    def log_reply(self, session: NodeSession, reply: node_pb2.LogReply) -> None:
        """Routes a chunk to its reader; what nobody waits for is dropped."""
        found = self._log_sinks.get(reply.request_id)
        if found is None or found[0] is not session:
            return
        if reply.chunk.eof or reply.chunk.error or reply.chunk.more:
            del self._log_sinks[reply.request_id]
        found[1](reply.chunk)

    def _drop_logs(self, session: NodeSession) -> None:
        self.traces.drop(session)
        for request_id in [key for key, (owner, _) in self._log_sinks.items() if owner is session]:
            self._log_sinks.pop(request_id)[1](None)
