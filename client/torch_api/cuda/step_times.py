"""Measures steps on a device without waiting for it: a step is counted when its events have passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bagua.torch_api.cuda.port import Moment
from bagua.torch_api.job.connection import Times
from bagua.torch_api.job.statistics import StatisticsRecorder

LONGEST = 256  # steps that are waited for; older ones go uncounted (a program that only queues work, for minutes)
TOGETHER = 8  # steps that are looked at together, since the first look of a while costs more than those after it


class _Step(NamedTuple):
    operations: Sequence[Times]
    begin: Moment
    end: Moment


class CudaSteps:
    """Passes steps on to ``StatisticsRecorder.add_step`` once their times are known."""

    def __init__(self, recorder: StatisticsRecorder, times: Callable[[int], Times]) -> None:
        """``times``: returns the times of the operation with this ticket; 0 for each that is not known."""
        self._recorder = recorder
        self._times = times
        self._open: deque[_Step] = deque(maxlen=LONGEST)

    def add(self, operations: Sequence[Times], begin: Moment, end: Moment) -> None:
        """Adds a step whose operations have been waited for between two moments of the stream. Of the operations' times
        only the first number, the ticket, is known."""
        self._open.append(_Step(operations, begin, end))
        if len(self._open) % TOGETHER == 0:
            self.settle()

    def drop_open(self) -> None:
        """Drops the steps that are not counted yet. Call it when a new leg begins: it does not know their tickets."""
        self._open.clear()

    def settle(self, wait: bool = False) -> None:
        """Counts the steps that are over; with ``wait``, all of them, once they are."""
        while self._open:
            step = self._open[0]
            if wait:
                step.end.await_on_host()
            elif not step.end.passed():
                return
            self._open.popleft()
            begin, end = step.begin.nanoseconds(), step.end.nanoseconds()
            known = [self._times(operation[0]) for operation in step.operations]
            # An operation without times was released: its step stayed open while many others were waited for.
            # The end of the step stands for the end of each operation, which the host sees late: all were over when
            # the stream went on.
            self._recorder.add_step([(times[0], times[1], end) for times in known if times[1]], begin, end)
