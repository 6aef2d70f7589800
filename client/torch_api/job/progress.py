"""Progress of the training, told to the daemon by a thread of its own: a report never blocks or fails the training."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from bagua.base.errors import ServiceError
from bagua.base.trace_context import STEPS_VARIABLE
from bagua.proto.common_pb2 import HostBytes, Progress, SampledStep
from bagua.torch_api.job.daemon import DaemonClient
from bagua.torch_api.job.reports import as_number
from bagua.torch_api.job.statistics import StatisticsRecorder, StepTimes

LOG = logging.getLogger("bagua")
INTERVAL_S = 0.25
BY_ITSELF_S, BY_ITSELF_MOST_S, RANKS_A_SECOND = 1.0, 30.0, 4
"""A rank that trains reports so often, whatever its program does: the dashboard shows how each rank's steps divide.
High ranks do so less often, so that large jobs cost the coordinator little."""
LAST_REPORT_DEADLINE_S = 2.0


MAX_METRICS = 64  # that the daemon takes; the user's come first


def figures(step: StepTimes | None) -> dict[str, float]:
    """Returns how the newest step's time divides, in ms, as metrics of a report."""
    if step is None:
        return {}
    return {
        "comm exposed ms": step.exposed_seconds * 1e3,
        "comm hidden ms": step.hidden_seconds * 1e3,
        "compute ms": step.compute_seconds * 1e3,
    }


class ProgressReporter:
    """Sends the newest report at most every quarter of a second. The thread starts with the first report.

    ``statistics`` is asked for the figures of the newest step and of recent ones, and ``counters`` for those of the
    host's engine: all go with every report.
    """

    def __init__(
        self,
        daemon: DaemonClient,
        rank: int,
        statistics: StatisticsRecorder,
        counters: Callable[[], Mapping[str, int]],
    ) -> None:
        self._daemon = daemon
        self._statistics = statistics
        self._counters = counters
        self.rank = rank
        self._pid = os.getpid()
        self._condition = threading.Condition()  # guards the fields below
        self._newest: Progress | None = None
        every = os.environ.get(STEPS_VARIABLE, "")
        self._trace_every = int(every) if every.isdecimal() else 0  # a wrong value costs no training
        self._sampled: SampledStep | None = None  # waits for the next report
        self._told: Progress | None = None  # the last report of the program
        self._reported_at = time.monotonic()
        self._closing = False
        self._thread: threading.Thread | None = None

    def report(self, step: int, total: int, metrics: Mapping[str, float], message: str) -> None:
        """Keeps the report for the thread."""
        if os.getpid() != self._pid:  # a forked child has no thread that would send it
            return
        try:
            told = Progress(
                job_id=self._daemon.job_id,
                rank=self.rank,
                step=max(0, int(step)),
                total=max(0, int(total)),
                metrics={name: as_number(value) for name, value in metrics.items()},
                message=str(message),
            )
        except (TypeError, ValueError) as error:
            LOG.warning("This progress report was ignored: %s", error)
            return
        self._told = told
        self._post(told)

    def step_done(self, steps: int) -> None:
        """Reports now and then that this rank has done so many steps, with what the program told last."""
        sampled = self._trace_every > 0 and steps % self._trace_every == 0
        if sampled:
            self._sample(steps)
        interval = min(BY_ITSELF_MOST_S, max(BY_ITSELF_S, self.rank / RANKS_A_SECOND))
        early = time.monotonic() - self._reported_at < interval
        if (early and not sampled) or os.getpid() != self._pid:
            return
        told = self._told
        # A rank that has told nothing shows its steps all the same.
        self._post(Progress(job_id=self._daemon.job_id, step=steps, by_itself=True) if told is None else told)

    def _sample(self, steps: int) -> None:
        if (times := self._statistics.last_step()) is not None:
            seconds = times.compute_seconds + times.exposed_seconds
            self._sampled = SampledStep(
                step=steps,
                began=time.time() - seconds,
                seconds=seconds,
                compute=times.compute_seconds,
                exposed=times.exposed_seconds,
                hidden=times.hidden_seconds,
            )

    def _post(self, told: Progress) -> None:
        """Hands the report to the thread, with figures of this moment."""
        progress = Progress()
        progress.CopyFrom(told)  # a copy: the program's last report may be sent again, with other figures
        progress.rank = self.rank  # the present one
        self._add_figures(progress)
        self._reported_at = time.monotonic()
        with self._condition:
            self._newest = progress
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, daemon=True, name="bagua progress")
                self._thread.start()
            self._condition.notify_all()

    def _add_figures(self, progress: Progress) -> None:
        more = {
            name: value for name, value in figures(self._statistics.last_step()).items() if name not in progress.metrics
        }
        if len(progress.metrics) + len(more) <= MAX_METRICS:
            progress.metrics.update(more)
        if (shares := self._statistics.recent.shares()) is not None:
            progress.shares.CopyFrom(shares)
        counters = self._counters()
        progress.bytes.CopyFrom(HostBytes(inside=counters["bytes_local"], between=counters["bytes_sent"]))

    def close(self) -> None:
        """Lets the last report go out (for at most 2 s) and ends the thread."""
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(LAST_REPORT_DEADLINE_S)

    def _take(self) -> Progress | None:
        """The newest report, when there is one; None when it is time to end."""
        with self._condition:
            self._condition.wait_for(lambda: self._closing or self._newest is not None)
            found, self._newest = self._newest, None
            return found

    def _run(self) -> None:
        with self._daemon.channel() as stub:  # kept open, unlike channels of single calls: reports come all the time
            while (progress := self._take()) is not None:
                if (sampled := self._sampled) is not None:
                    progress.sampled.CopyFrom(sampled)
                    self._sampled = None
                try:
                    self._daemon.report(progress, stub)
                except ServiceError as error:
                    LOG.debug("A progress report was lost: %s", error)
                self._pause(time.monotonic() + INTERVAL_S)

    def _pause(self, until: float) -> None:
        with self._condition:
            while not self._closing and (left := until - time.monotonic()) > 0:
                self._condition.wait(left)
