"""Progress of the training, told to the daemon by a thread of its own: a report never blocks or fails the training."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from bagua.base.errors import ServiceError
from bagua.proto.common_pb2 import Progress
from bagua.torch_api.join.daemon import DaemonClient
from bagua.torch_api.join.reports import as_number
from bagua.torch_api.join.statistics import StepTimes

LOG = logging.getLogger("bagua")
INTERVAL_S = 0.25
LAST_REPORT_DEADLINE_S = 2.0


MAX_METRICS = 64  # that the daemon takes; the user's come first


def figures(step: StepTimes | None) -> dict[str, float]:
    """How the newest step's time divides, in ms, as metrics of a report."""
    if step is None:
        return {}
    return {
        "comm exposed ms": step.exposed_seconds * 1e3,
        "comm hidden ms": step.hidden_seconds * 1e3,
        "compute ms": step.compute_seconds * 1e3,
    }


class ProgressReporter:
    """Sends the newest report at most every quarter of a second. The thread starts with the first report.

    ``last_step`` is asked for the figures of the newest step, which go with every report.
    """

    def __init__(self, daemon: DaemonClient, rank: int, last_step: Callable[[], StepTimes | None]) -> None:
        self._daemon = daemon
        self._last_step = last_step
        self.rank = rank
        self._pid = os.getpid()
        self._condition = threading.Condition()  # guards the fields below
        self._newest: Progress | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def report(self, step: int, total: int, metrics: Mapping[str, float], message: str) -> None:
        """Keeps the report for the thread."""
        if os.getpid() != self._pid:
            return
        try:
            progress = Progress(
                job_id=self._daemon.job_id,
                rank=self.rank,
                step=max(0, int(step)),
                total=max(0, int(total)),
                metrics=self._with_figures({name: as_number(value) for name, value in metrics.items()}),
                message=str(message),
            )
        except (TypeError, ValueError) as error:
            LOG.warning("This progress report was ignored: %s", error)
            return
        with self._condition:
            self._newest = progress
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._run, daemon=True, name="bagua progress")
                self._thread.start()
            self._condition.notify_all()

    def _with_figures(self, metrics: dict[str, float]) -> dict[str, float]:
        everything = figures(self._last_step()) | metrics
        return everything if len(everything) <= MAX_METRICS else metrics

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
        with self._daemon.channel() as stub:
            while (progress := self._take()) is not None:
                try:
                    self._daemon.report(progress, stub)
                except ServiceError as error:
                    LOG.debug("A progress report was lost: %s", error)
                self._pause(time.monotonic() + INTERVAL_S)

    def _pause(self, until: float) -> None:
        with self._condition:
            while not self._closing and (left := until - time.monotonic()) > 0:
                self._condition.wait(left)
