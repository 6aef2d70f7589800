"""Schedules of checkpoints: every so many steps, or so many seconds, and on all ranks after the same step.

Steps need no message. Of time rank 0 decides, and the others must hear it: not after each step, but after those on
which all have agreed the time before. The closer the checkpoint, the fewer steps lie between two of them. Where
somebody may ask for a checkpoint, they lie a few seconds apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

Clock = Callable[[], float]
Asked = Callable[[], bool]

LOOK_S = 2.0  # between two looks whether a checkpoint is asked for


class Decision(NamedTuple):
    """Decision of rank 0: whether a checkpoint is written after this step, and the step after which rank 0 decides
    next.
    """

    save: bool
    look: int


class Schedule:
    """Writes a checkpoint after each step whose number is a multiple of ``every``, or after the step that ends nearest
    to that time after the last one. With ``asked`` also when that says so. Raises TypeError and ValueError for a value
    of ``every`` that can't be.

    ``look``: the next step after which a checkpoint may be due, but for those that follow from the step's number.
    """

    def __init__(self, every: int | timedelta, clock: Clock, asked: Asked | None = None) -> None:
        self._steps: int | None = None
        self._seconds = math.inf
        if isinstance(every, timedelta):
            if every <= timedelta(0):
                raise ValueError(f"every is {every}: it must be a time above zero. [BG707]")
            self._seconds = every.total_seconds()
        elif isinstance(every, bool) or not isinstance(every, int):
            raise TypeError(f"every is {every!r}: pass a number of steps, or a datetime.timedelta. [BG707]")
        elif every < 1:
            raise ValueError(
                f"every is {every}: it must be a number of steps from 1 on, or a datetime.timedelta. [BG707]"
            )
        else:
            self._steps = every
        self._clock = clock
        self._asked = asked
        self.restart(0)

    def restart(self, steps: int) -> None:
        """Counts from this number of steps on. Nothing is due then."""
        self._since = self._looked = self._clock()
        self._looked_at = steps
        self.look = steps + 1

    def due(self, steps: int, agree: Callable[[Callable[[], Decision]], Decision]) -> bool:
        """True if a checkpoint is to be written after step ``steps``. ``agree(decide)`` returns what ``decide()``
        returns on rank 0; all ranks call it after the same steps."""
        due = self._steps is not None and steps % self._steps == 0
        if steps < self.look or (self._seconds == math.inf and self._asked is None):
            return due
        now = self._clock()
        save, self.look = agree(lambda: self._decide(steps, now))
        if save:
            self._since = now
        self._looked, self._looked_at = now, steps
        return save or due

    def _decide(self, steps: int, now: float) -> Decision:
        done = max(1, steps - self._looked_at)
        step = max((now - self._looked) / done, 1e-9)  # the clock may stand still between two steps
        left = self._seconds - (now - self._since)
        # The nearest step: half a step early is as good as half a step late.
        save = left < step / 2 or (self._asked is not None and self._asked())
        if save:
            left = self._seconds
        if self._asked is not None:
            left = min(left, 2 * LOOK_S)
        # Half of the way, and not more than twice as far as was seen: steps may become slower.
        return Decision(save, steps + max(1, min(math.ceil(left / step / 2), 2 * done)))
