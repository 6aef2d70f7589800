"""Keeps the stream to the coordinator open: sends facts, receives directives, and reconnects for ever.

What waits to be sent is bounded by its nature: of a job its latest state, of a rank its latest progress, and of logs
as much as the queue holds (readers of logs wait). So a coordinator that is away or slow costs nothing, and jobs do
not notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from bagua.base.errors import ConfigError
from bagua.base.machine_clock import boottime, clock_name
from bagua.base.port_probe import refuses
from bagua.base.protocol import misfit
from bagua.base.rpc import STEADY_WINDOW
from bagua.base.security import TlsFiles, call_metadata, channel_credentials, read_token
from bagua.daemon.node.session.lease import Lease
from bagua.daemon.node.session.questions import Questions
from bagua.proto import common_pb2, node_pb2
from bagua.proto.node_pb2_grpc import NodeServiceStub

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0  # well below any lease: a coordinator that comes back finds the node in time
WELCOME_S = 10.0
_REPLIES = 16
_MAX_MESSAGE = 16 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    # Together well below a lease: a daemon leaves a coordinator that is lost or stopped before another one, which has
    # not heard of the node meanwhile, gives it up. Coordinators refuse pings that come within 5 s of each other.
    ("grpc.keepalive_time_ms", 5_500),
    ("grpc.keepalive_timeout_ms", 3_000),  # for the kernel's acknowledgement, which one that is stopped gives, too
    ("grpc.http2.ping_timeout_ms", 2_500),  # for its own answer; a minute without this
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a new channel begins without the old one's backoff
    *STEADY_WINDOW,
]
_EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the type stubs
_BAD_CREDENTIAL = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_REFUSALS = (  # trying again changes nothing
    *_BAD_CREDENTIAL,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
)


class _Misfit(Exception):
    """The coordinator's version and this one can't talk: why, in words."""


@dataclass(frozen=True)
class Endpoint:
    """Address of the coordinator, and credentials for it."""

    address: str
    token_file: Path
    tls: TlsFiles | None

    def channel(self) -> grpc.aio.Channel:
        """Raises ConfigError if a file of the certificates can't be read."""
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=_OPTIONS)
        return grpc.aio.secure_channel(self.address, channel_credentials(self.tls), options=_OPTIONS)


class Session:
    """Keeps one stream open. ``hello`` makes the first message, ``snapshot`` the latest state of a job, ``status`` that
    of the node, ``on_directive`` gets everything but Welcome and acknowledgements, which renew ``lease``;
    ``on_connection`` learns of the stream's beginning and end."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        hello: Callable[[], node_pb2.Hello],
        snapshot: Callable[[str], node_pb2.LocalJob | None],
        status: Callable[[], node_pb2.NodeStatus],
        on_directive: Callable[[node_pb2.Directive], None],
        on_connection: Callable[[bool], None],
        lease: Lease,
        log: FilteringBoundLogger,
    ) -> None:
        self.connected = False
        self.welcomed = asyncio.Event()  # at least once
        self._endpoint = endpoint
        self._hello = hello
        self._snapshot = snapshot
        self._status = status
        self._on_directive = on_directive
        self._on_connection = on_connection
        self._lease = lease
        self._log = log
        self._heartbeat_s = 1.0
        self._jobs: dict[str, None] = {}  # to be reported, in the order of their changes
        self._status_changed = False
        self._progress: dict[tuple[str, int], common_pb2.Progress] = {}
        self.questions = Questions(self._something_to_send)
        self._replies: asyncio.Queue[node_pb2.NodeFact] = asyncio.Queue(_REPLIES)
        self._answers: deque[node_pb2.NodeFact] = deque(maxlen=_REPLIES)  # short ones; nobody waits to put them there
        self._wake = asyncio.Event()
        self._ending = False  # finish() was called
        self._over = asyncio.Event()  # no stream follows

    # ── what others hand in ──

    def report(self, job_id: str) -> None:
        """Reports that the state of a job has changed."""
        self._jobs[job_id] = None
        self._something_to_send()

    def report_status(self) -> None:
        """Reports that the state of the node has changed."""
        self._status_changed = True
        self._something_to_send()

    def refuse_upgrade(self, request_id: int, reason: str) -> None:
        """Refuses an upgrade: the present daemon stays."""
        refusal = node_pb2.UpgradeRefusal(request_id=request_id, reason=reason)
        self._answers.append(node_pb2.NodeFact(upgrade_refusal=refusal))
        self._something_to_send()

    def progress(self, progress: common_pb2.Progress) -> None:
        """Replaces what waits of the same rank."""
        self._progress[progress.job_id, progress.rank] = progress
        self._something_to_send()

    async def reply(self, fact: node_pb2.NodeFact) -> None:
        """Sends a piece of a log or a trace. Waits while the coordinator is slow."""
        await self._replies.put(fact)
        self._something_to_send()

    def tell_time(self, request_id: int) -> None:
        """Answers the coordinator, which asks what time it is here."""
        reply = node_pb2.ClockReply(request_id=request_id, monotonic_ns=time.monotonic_ns(), clock=clock_name())
        self._answers.append(node_pb2.NodeFact(clock=reply))
        self._something_to_send()

    async def finish(self) -> None:
        """Sends what was reported, says that nothing more comes, and returns when the coordinator has ended the stream:
        then it has read all of it. A stream that is cancelled instead may take its last messages with it."""
        self._ending = True
        self._something_to_send()
        await self._over.wait()

    # ── the stream ──

    async def run(self) -> None:
        """Runs until cancelled, or until ``finish`` is over. Raises ConfigError if the coordinator refuses this daemon
        before it ever was welcome, or there is no token or certificate to show.
        """
        backoff, told = FIRST_BACKOFF_S, ""
        while True:
            reason, refused = await self._one_stream()
            if self._ending:
                self._over.set()
                return
            if refused and not self.welcomed.is_set():
                raise ConfigError(f"The coordinator at {self._endpoint.address} refuses this daemon: {reason} [BG902]")
            if self.connected or reason != told:
                text = "the coordinator is away; jobs go on, and so do tries to reach it"
                self._log.warning(text, address=self._endpoint.address, reason=reason)
                told = reason
            if self.connected:
                backoff = FIRST_BACKOFF_S
            self._set_connected(False)
            await self._ask_the_port()
            pause = backoff * random.uniform(0.5, 1.5)  # daemons must not all come back at the same moment
            # While refusals renew the lease they must be asked for well before it ends.
            await asyncio.sleep(min(pause, self._lease.fence_s / 8) if self._lease.asks(boottime()) else pause)
            backoff = min(backoff * 2, MAX_BACKOFF_S)

    async def _ask_the_port(self) -> None:
        """Coordinators that are down decide nothing: while their ports refuse connections, the lease goes on."""
        before = boottime()
        if not self._lease.asks(before):
            return
        asked = [refuses(address) for address in (self._endpoint.address, *self._lease.coordinators)]
        if all(await asyncio.gather(*asked)):
            self._lease.refused(before)

    async def _one_stream(self) -> tuple[str, bool]:
        """Runs one stream to its end: (why it ended, was it a refusal). An unreadable token file
        ends it too: whoever copies a new one there need not restart the daemon."""
        try:
            metadata = call_metadata(await asyncio.to_thread(read_token, self._endpoint.token_file))
            channel = self._endpoint.channel()
        except ConfigError as error:
            if not self.welcomed.is_set():
                raise  # the coordinator was not asked: nobody refuses anything
            return str(error), True
        except RuntimeError as error:  # no thread can be started
            return str(error), False
        async with channel:
            stub: Any = NodeServiceStub(channel)  # its types are those of a blocking stub
            call = stub.Session(metadata=metadata)
            try:
                return await self._talk(call), False
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() in _BAD_CREDENTIAL:
                    reason += f" The token file {self._endpoint.token_file} must be a copy of the coordinator's."
                return reason, error.code() in _REFUSALS
            except _Misfit as error:
                return str(error), True
            except TimeoutError:
                return f"no Welcome in {WELCOME_S:g} s", False
            except asyncio.InvalidStateError as error:  # grpc.aio: the call ended under a write
                return f"the stream broke: {error}", False
            finally:
                call.cancel()

    async def _talk(self, call: Any) -> str:
        """Hello, Welcome, then both directions at once until one of them ends."""
        self._drop_replies()
        self._jobs.clear()  # Hello says everything
        self._status_changed = False
        self._lease.hello(boottime())
        await call.write(node_pb2.NodeFact(hello=self._hello()))
        async with asyncio.timeout(WELCOME_S):
            first = await call.read()
        kind = None if first is _EOF else first.WhichOneof("directive")
        if kind not in ("welcome", "terms"):
            await _raise_status(call)
            return "the coordinator did not say Welcome"
        welcome = first.welcome if kind == "welcome" else first.terms
        whose = f"The coordinator at {self._endpoint.address}"
        if words := misfit(welcome.version, welcome.protocol, welcome.oldest_protocol, whose):
            raise _Misfit(words)
        self._set_heartbeat(welcome.heartbeat_s)
        self._lease.welcome(welcome)
        if kind == "welcome":
            self._set_connected(True)
        else:
            self._log.warning("the coordinator waits for its database; jobs go on", address=self._endpoint.address)
        ends = [asyncio.ensure_future(self._read(call)), asyncio.ensure_future(self._write(call))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(filter(asyncio.Future.done, ends)).result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            # An error holds this frame: if the frame held the error, the call would keep its connection until the
            # garbage collector comes.
            ends.clear()
            del end

    async def _read(self, call: Any) -> str:
        while (directive := await call.read()) is not _EOF:
            if directive.HasField("ack"):
                ack = directive.ack
                self._lease.acknowledged(ack.seq, ack.grant if ack.HasField("grant") else None, self.connected)
                self._set_heartbeat(directive.ack.heartbeat_s)
                continue
            if directive.HasField("welcome"):  # after terms
                self._lease.welcome(directive.welcome)
                self._set_connected(True)
                self._something_to_send()
                continue
            try:
                self._on_directive(directive)
            except Exception:  # a fault in one directive must not end the stream, nor be repeated for ever
                self._log.exception("a directive failed", directive=directive.WhichOneof("directive"))
        await _raise_status(call)
        return "the coordinator ended the stream"

    async def _write(self, call: Any) -> str:
        """Sends what there is and, however much that is, a heartbeat in time."""
        loop = asyncio.get_running_loop()
        next_beat = loop.time() + self._heartbeat_s
        while True:
            self._wake.clear()
            while loop.time() < next_beat and (fact := self._next_fact()) is not None:
                await call.write(fact)
            if self._ending and not (self._jobs or self._progress or self._status_changed):
                await call.done_writing()
                await self._over.wait()  # for ever: reading ends the stream
            try:
                async with asyncio.timeout_at(next_beat):
                    await self._wake.wait()
            except TimeoutError:
                seq = self._lease.beat(boottime())
                await call.write(node_pb2.NodeFact(heartbeat=node_pb2.Heartbeat(seq=seq)))
                next_beat = loop.time() + self._heartbeat_s
                self._wake.set()  # something may have been left for the beat

    def _next_fact(self) -> node_pb2.NodeFact | None:
        """The next fact: that of the node first, then states of jobs, then progress, then logs. Before Welcome none."""
        if not self.connected:
            return None
        if self._answers:
            return self._answers.popleft()
        if self._status_changed:
            self._status_changed = False
            return node_pb2.NodeFact(status=self._status())
        while self._jobs:
            job_id = next(iter(self._jobs))
            del self._jobs[job_id]
            if (job := self._snapshot(job_id)) is not None:
                return node_pb2.NodeFact(job=job)
        if self._progress:
            return node_pb2.NodeFact(progress=self._progress.pop(next(iter(self._progress))))
        if (question := self.questions.next_fact()) is not None:
            return question
        with contextlib.suppress(asyncio.QueueEmpty):
            return self._replies.get_nowait()
        return None

    def _set_heartbeat(self, seconds: float) -> None:
        if 0 < seconds < math.inf:
            self._heartbeat_s = min(max(seconds, 0.05), 60.0)  # whatever is said: neither a flood nor silence

    def _something_to_send(self) -> None:
        self._wake.set()

    def _set_connected(self, connected: bool) -> None:
        if connected is self.connected:
            return
        self.connected = connected
        if connected:
            self.welcomed.set()
            self._log.info("connected to the coordinator", address=self._endpoint.address)
        else:
            self._drop_replies()
            self.questions.fail_all()
        self._on_connection(connected)

    def _drop_replies(self) -> None:
        """Replies to requests of a stream that is no more."""
        while not self._replies.empty():
            self._replies.get_nowait()
        self._answers.clear()


async def _raise_status(call: Any) -> None:
    """Raises AioRpcError if the call ended with an error."""
    code = await call.code()
    if code is not grpc.StatusCode.OK:
        initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
        raise grpc.aio.AioRpcError(code, initial, trailing, await call.details(), None)
