"""Records the next training steps of this rank, when somebody asks for a trace of the job while it runs.

The daemon asks by a word in shared memory, at which each model looks before a forward pass. Nothing else happens until
then. The spans go to the daemon from a thread of their own, when all steps are recorded, and once a second before.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from bagua.base.errors import ServiceError
from bagua.proto.common_pb2 import TraceSpan
from bagua.proto.rank_pb2 import TraceReport
from bagua.torch_api.job.connection import Times
from bagua.torch_api.job.daemon import DaemonClient
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.module_hook import beside_graphs
from bagua.torch_api.step.phases import WATCH, bucket_name
from bagua.torch_api.train.wrapped import Wrapped

LOG = logging.getLogger("bagua")

MOST_SPANS = 20_000
"""Of one rank in one trace."""
AT_ONCE = 4_000
"""Spans of one message: 300 KiB at most."""
SEND_EVERY_NS = 1_000_000_000
LAST_SEND_S = 2.0
STEPS_BITS = 16


class Tracer:
    """One of a session, for all models: ``session.keep(Tracer)``."""

    def __init__(self, session: Session) -> None:
        self._asked = session.connection.asked_for_trace  # the function itself: it is asked in each forward pass
        self._session = session
        self._seen = 0
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.recording: Recording | None = None
        session.close_first(self._close)

    def add(self, model: Wrapped) -> None:
        self._models.add(model)

    def look(self, model: Wrapped) -> None:
        """Begins what is asked for, and counts steps. Called before each forward pass in training."""
        asked = self._asked()
        if asked != self._seen:
            self._seen = asked
            self._end()
            if asked and self._session.daemon is not None:
                number, steps = asked >> STEPS_BITS, asked & ((1 << STEPS_BITS) - 1)
                self.recording = Recording(self._session, self._session.daemon, number, steps, model)
                for one in self._models:
                    self.recording.watch(one)
        elif self.recording is not None and not self.recording.begin_step(model):
            self._end()

    def _end(self) -> None:
        if self.recording is not None:
            self.recording.end()
            self.recording = None

    def _close(self) -> None:
        recording = self.recording
        self._end()
        if recording is not None:
            recording.sender.join(LAST_SEND_S)


class Recording:
    """One trace on this rank. It is the ``Sink`` of phases; spans of other threads than that of ``leader``, whose
    forward passes begin steps, are marked."""

    def __init__(self, session: Session, daemon: DaemonClient, number: int, steps: int, leader: Wrapped) -> None:
        self._steps = steps
        self._step = -1  # steps that are recorded whole
        self._number = 0  # of the present step: the leader's forward passes in training, the same on all ranks
        self._leader = leader
        self._pid, self._thread = os.getpid(), threading.get_ident()
        self._report = TraceReport(
            job_id=daemon.job_id,
            rank=session.membership.member,
            number=session.membership.rank,
            request=number,
        )
        self._spans: list[TraceSpan] = []
        self._count = self._dropped = 0
        self._began: dict[tuple[int, str], int] = {}
        self._ready: dict[str, int] = {}
        self._handles: list[Any] = []
        self._step_began = self._sent = time.monotonic_ns()
        self.synchronised = True
        self.sender = _Sender(daemon)
        WATCH.sink = self
        self.begin_step(leader)

    def watch(self, model: Wrapped) -> None:
        """Optimizers of this model are recorded, too."""
        for optimizer in model.bagua_optimizers:
            name = type(optimizer).__name__
            before = functools.partial(self._optimizer, name, True)
            after = functools.partial(self._optimizer, name, False)
            self._handles += [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    @beside_graphs
    def _optimizer(self, name: str, begin: bool, *_: Any) -> None:
        self._enclose("optimizer", begin, name)

    def begin_step(self, model: Wrapped) -> bool:
        """A forward pass of this model begins. False: all steps are recorded."""
        if model is not self._leader or not self.synchronised:
            return True
        now = time.monotonic_ns()
        if self._step >= 0:
            self.note("step", f"step {self._number}", self._step_began, now)
        self._step += 1
        self._number = model.bagua_train_step_counter + 1
        self._step_began = now
        self.synchronised = False
        if self._step >= self._steps:
            return False
        if now - self._sent >= SEND_EVERY_NS:
            self._send(now, done=False)
        return True

    def backward(self, model: object, begin: bool, synchronised: bool = False) -> None:
        """A backward pass begins, or has ended."""
        self.enclose(model, "backward", begin)
        self.synchronised = self.synchronised or (synchronised and not begin)

    def enclose(self, model: object, phase: str, begin: bool) -> None:
        """A phase of a model begins, or ends."""
        self._enclose(phase, begin, "" if model is self._leader else type(model).__name__)

    def _enclose(self, phase: str, begin: bool, name: str) -> None:
        now, key = time.monotonic_ns(), (threading.get_ident(), phase)
        if begin:
            self._began[key] = now
        elif (began := self._began.pop(key, None)) is not None:  # an end whose begin came before the recording
            self.note(phase, name, began, now)

    # ``Sink``

    def note(self, phase: str, name: str, begin: int, end: int) -> None:
        self._count += 1
        if self._count > MOST_SPANS:  # a trace that nobody ends must not fill memory
            self._dropped += 1
            return
        aside = int(threading.get_ident() != self._thread)
        self._spans.append(
            TraceSpan(phase=phase, name=name, comm=aside, sequence=self._number, begin_ns=begin, end_ns=end, peer=-1)
        )

    def ready(self, bucket: str) -> None:
        self._ready[bucket] = time.monotonic_ns()

    def operations(self, bucket: str, times: Sequence[Times]) -> None:
        """See ``Sink``. Times on a GPU are events, and left out."""
        ready, name = self._ready.pop(bucket, None), bucket_name(bucket)
        for submitted, started, done in times:
            if not isinstance(done, int):  # events of a GPU have no times of their own
                continue
            first = submitted if ready is None else min(ready, submitted)
            ready = None  # the first operation of a bucket begins where its last gradient came
            self.note("bucket", name, first, done)
            self.note("ready", name, first, submitted)
            # The engine may have begun before the rank noted that it had submitted.
            self.note("submitted", name, submitted, max(submitted, started))
            self.note("reduced", name, max(submitted, started), done)

    # To the daemon

    def _send(self, now: int, done: bool) -> None:
        spans, self._spans, self._sent = self._spans, [], now
        for begin in range(0, max(1, len(spans)), AT_ONCE):  # one message at least, when it is the last
            report = TraceReport(spans=spans[begin : begin + AT_ONCE], steps=max(0, self._step))
            report.MergeFrom(self._report)
            if done and begin + AT_ONCE >= len(spans):
                report.done, report.dropped = True, self._dropped
            self.sender.put(report)

    def end(self) -> None:
        """Records nothing more, and sends what was recorded."""
        WATCH.sink = None
        for handle in self._handles:
            handle.remove()
        if os.getpid() == self._pid:  # a forked child has no thread that sends
            self._send(time.monotonic_ns(), done=True)
            self.sender.put(None)


class _Sender:
    """Sends reports from a thread that lives as long as a trace."""

    def __init__(self, daemon: DaemonClient) -> None:
        self._daemon = daemon
        self._queue: queue.SimpleQueue[TraceReport | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="bagua trace")
        self._thread.start()

    def put(self, report: TraceReport | None) -> None:
        """Adds an entry; None: the last has been added."""
        self._queue.put(report)

    def join(self, seconds: float) -> None:
        """Waits until all is sent, for so long at most."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (report := self._queue.get()) is not None:
            try:
                self._daemon.report_trace(report)
            except ServiceError as error:
                LOG.debug("A part of a trace was lost: %s", error)
