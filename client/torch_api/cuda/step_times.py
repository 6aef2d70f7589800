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
        """``times``: those of a ticket; 0 for times that are not known, yet or any more."""
        self._recorder = recorder
        self._times = times
        self._open: deque[_Step] = deque(maxlen=LONGEST)

    def add(self, operations: Sequence[Times], begin: Moment, end: Moment) -> None:
        """A step whose operations have been waited for between two moments of the stream. Of the operations' times only
        the first number, the ticket, is known."""
        self._open.append(_Step(operations, begin, end))
        if len(self._open) % TOGETHER == 0:
            self.settle()

    def forget(self) -> None:
        """The steps that are not counted yet will not be: nobody knows their tickets any more."""
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
            # Operations of which nothing is known were released: a step that stayed open while many others were waited
            # for. The host sees late that an operation is over: this step's all were when its stream went on.
            self._recorder.add_step([(times[0], times[1], end) for times in known if times[1]], begin, end)
