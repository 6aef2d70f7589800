"""Follows a job on the terminal until it has ended: state, progress and the output of its ranks.

Two threads read the streams of the coordinator (updates and logs) into one queue; the caller's thread takes from it and
draws, so no two threads ever write to the terminal.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Thread
from typing import TYPE_CHECKING

from bagua.base.errors import BaguaError, ServiceError
from bagua.cli.display.terminal import Terminal
from bagua.cli.options import ALL_SHOWN, Shown
from bagua.client.describe import ENDED, job_state
from bagua.client.lines import LineAssembler, missing_text
from bagua.proto import common_pb2, job_pb2

if TYPE_CHECKING:
    from bagua.client import Client

LOG_PATIENCE_S = 3.0  # how long after the end of a job its last output is waited for

# Log chunks read but not yet drawn: a rank that prints faster than the terminal must not fill the memory.
CHUNKS_IN_FLIGHT = 64


@dataclass(frozen=True)
class StreamEnded:
    """A stream has ended, by itself or with an error."""

    stream: str
    error: Exception | None = None


@dataclass(frozen=True)
class CoordinatorAway:
    """The coordinator does not answer. The watch goes on when it is back."""

    why: str


@dataclass(frozen=True)
class Interrupted:
    """The user wants the end."""


@dataclass(frozen=True)
class ServiceDied:
    """A service of the embedded cluster has ended by itself."""

    words: str


@dataclass(frozen=True)
class NodeDied:
    """A node daemon has ended by itself; an elastic job goes on."""

    words: str


Event = job_pb2.JobUpdate | common_pb2.LogChunk | StreamEnded | CoordinatorAway | Interrupted | ServiceDied | NodeDied


class Detached(BaguaError):
    """The user stopped watching; the job goes on."""


class Follower:
    """Follows one job. ``on_interrupt`` is called in the caller's thread when the user pressed Ctrl-C for the first
    time: it asks for the job's end and returns the seconds to wait for it, or raises Detached.
    """

    def __init__(
        self,
        client: Client,
        job: job_pb2.Job,
        terminal: Terminal,
        on_interrupt: Callable[[], float],
        shown: Shown = ALL_SHOWN,
        excused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.job = job
        self._excused = excused  # nothing is said of a coordinator that is away
        self.several = job.spec.nnodes * job.spec.nproc_per_node > 1
        self._shown = shown
        self._ranks = () if job.spec.elastic else shown.ranks  # an elastic job may not have them yet
        self._client = client
        self._terminal = terminal
        self._on_interrupt = on_interrupt
        self._events: SimpleQueue[Event] = SimpleQueue()  # its put may interrupt itself, in a handler of a signal
        self._credit = BoundedSemaphore(CHUNKS_IN_FLIGHT)
        self._assemblers: dict[int, LineAssembler] = {}
        self._logs_ended = False
        self._interrupted = False
        self._deadline = float("inf")

    def post(self, event: Event) -> None:
        """Hands an event to the loop; from any thread and from signal handlers."""
        self._events.put(event)

    def run(self) -> job_pb2.Job:
        """Returns the job once it has ended and its output was shown, or when the wait after an interrupt is over (then
        it has not ended). Raises ServiceError when the service is gone, Detached when ``on_interrupt`` says so."""
        job_id, client = self.job.job_id, self._client
        self._start("watch", lambda: client.watch(job_id, on_away=lambda why: self.post(CoordinatorAway(why))))
        # The watch says when the coordinator is away, and for how long; the logs just wait.
        self._start("logs", lambda: client.logs(job_id, ranks=self._ranks, follow=True, patience_s=math.inf))
        while not (self.job.state in ENDED and self._logs_ended):
            try:
                # Python's locks take no infinite time.
                event = self._events.get(timeout=min(3600.0, max(0.0, self._deadline - time.monotonic())))
            except Empty:
                if time.monotonic() >= self._deadline:
                    break
                continue
            self._handle(event)
        for rank, assembler in sorted(self._assemblers.items()):  # lines that nobody has ended
            self._show(rank, assembler.finish())
        return self.job

    def _handle(self, event: Event) -> None:
        match event:
            case common_pb2.LogChunk():
                self._credit.release()
                self._log(event)
            case job_pb2.JobUpdate():
                self._update(event)
            case CoordinatorAway():
                if not self._excused():
                    self._terminal.away(event.why)
            case StreamEnded():
                self._stream_ended(event)
            case ServiceDied():
                raise ServiceError(f"{event.words} [BG801]")
            case NodeDied():
                self._terminal.note(event.words)
            case Interrupted():
                self._interrupted = True
                self._terminal.passing("stopping")
                self._deadline = min(self._deadline, time.monotonic() + self._on_interrupt())

    def _update(self, update: job_pb2.JobUpdate) -> None:
        match update.WhichOneof("update"):
            case "job":
                self.job = update.job
                if self.job.state not in ENDED and not self._interrupted:
                    self._terminal.status(self._headline())
                if self.job.state in ENDED:
                    self._deadline = min(self._deadline, time.monotonic() + LOG_PATIENCE_S)
            case "event" if update.event.kind == "regrouped":
                self._terminal.note(update.event.reason)
            case "progress" if not update.progress.by_itself:
                self._terminal.progress(update.progress)

    def _headline(self) -> str:
        if self.job.waiting and self.job.state != common_pb2.JOB_STATE_STOPPING:
            return f"{job_state(self.job.state)}: {self.job.waiting}"
        if self.job.state == common_pb2.JOB_STATE_PENDING and self.job.reason:
            return f"pending: {self.job.reason}"
        return job_state(self.job.state)

    def _log(self, chunk: common_pb2.LogChunk) -> None:
        if not self._shown.shows(chunk.rank):
            return
        if chunk.error:
            self._terminal.note(f"The output of rank {chunk.rank} can't be read: {chunk.error}")
        assembler = self._assemblers.setdefault(chunk.rank, LineAssembler())
        if chunk.missing:
            self._show(chunk.rank, assembler.finish())
            self._terminal.note(missing_text(chunk.rank, chunk.missing))
        self._show(chunk.rank, assembler.feed(chunk.data, time.monotonic()))
        if chunk.eof:
            self._show(chunk.rank, assembler.finish())

    def _show(self, rank: int, lines: list[str]) -> None:
        prefix = self._shown.line_prefix(rank, self.several)
        for line in lines:
            self._terminal.line(prefix + line)

    def _stream_ended(self, event: StreamEnded) -> None:
        if event.stream == "logs":
            self._logs_ended = True
            if event.error is not None and self.job.state not in ENDED:
                self._terminal.note(f"The output can't be read any more: {event.error}")
        elif self.job.state not in ENDED:
            raise event.error or ServiceError("The coordinator stopped telling of the job before it had ended. [BG801]")

    def _start(self, stream: str, start: Callable[[], Iterator[Event]]) -> None:
        """Reads a stream of the coordinator in a thread of its own."""

        def read() -> None:
            error: Exception | None = None
            try:
                for event in start():
                    if isinstance(event, common_pb2.LogChunk):
                        self._credit.acquire()
                    self._events.put(event)
            except Exception as caught:
                error = caught
            self._events.put(StreamEnded(stream, error))

        Thread(target=read, daemon=True, name=stream).start()
