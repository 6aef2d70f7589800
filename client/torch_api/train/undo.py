"""Executions in an elastic job: what a plan can't do twice waits until the unit is committed (``commit/ledger.py``).

Everything up to the last step that communicates may run again, from the same contents. What follows runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from bagua.algorithms.plan import WEIGHT, Local, Plan
from bagua.torch_api.join.connection import Connection, Regrouped, Times
from bagua.torch_api.train.bucket import PlanBucket
from bagua.torch_api.train.dataflow import changed_in_place
from bagua.torch_api.train.execution import Execution, Phase


class Undo:
    """Contents that a plan changes before its last step that communicates: saved when it starts, restored before it
    starts again."""

    def __init__(self, bucket: PlanBucket, plan: Plan) -> None:
        self._bucket = bucket
        self._slots = changed_in_place(plan)
        self._beside = [step.beside for step in plan.steps if isinstance(step, Local) and step.beside is not None]
        self._copies: list[torch.Tensor] = []
        self.saved = False
        """Set it to False when the changes count."""

    def _tensors(self) -> list[torch.Tensor]:
        found = [tensor for tensors in self._beside for tensor in tensors()]
        for name in self._slots:
            found += self._bucket.views(WEIGHT) if name == WEIGHT else [self._bucket.slot(name)]
        return found

    def save(self) -> None:
        """Nothing if that has been done, and the changes do not count yet."""
        if self.saved or not (self._slots or self._beside):
            return
        tensors = self._tensors()
        if not self._copies:
            self._copies = [torch.empty_like(tensor) for tensor in tensors]
        with torch.no_grad():
            torch._foreach_copy_(self._copies, tensors)
        self.saved = True

    def restore(self) -> None:
        """Contents are as when they were saved, if they were."""
        if self.saved:
            with torch.no_grad():
                torch._foreach_copy_(self._tensors(), self._copies)


class HeldExecution(Execution):
    """``arrived``: all that communicates is over, and ``conclude`` is to be called. ``lost``: members have changed
    since the start, or before it. Then it is to be started again: ``rewind``; but for one that had arrived, and that
    other members have committed: ``conclude``. ``ended``: the generation in which it was to start has ended, and the
    next one has not been entered since."""

    __slots__ = ("__weakref__", "_closing", "_eager", "_steady", "_undo", "ended", "lost")
    holds = True

    def __init__(
        self,
        name: str,
        phases: Sequence[Phase],
        connection: Connection,
        undo: Undo,
        eager: Callable[[], bool],
        steady: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``eager``: whether it may begin when it is started, and not when it is joined. ``steady``: inside it
        operations are of one generation."""
        self._closing = phases[-1][0] if phases[-1][1] is None else ()
        super().__init__(name, phases[:-1] if phases[-1][1] is None else phases, connection)
        self._undo = undo
        self._eager = eager
        self._steady = steady
        self.arrived = self.lost = self.ended = False

    def start(self) -> None:
        """See ``Execution``. Where members have changed, or it may not begin yet, it is told as started, and
        ``lost``."""
        with self._steady():
            if not self._phases or not self._eager():
                self.started, self.lost = True, bool(self._phases)
                self.starts += 1
                return
            self._undo.save()
            try:
                super().start()
            except Regrouped:
                self.started = self.lost = self.ended = True
                self.starts += 1

    def advance(self, times: list[Times]) -> bool:
        """See ``Execution``. Raises Regrouped if it is lost."""
        if self.lost:
            raise Regrouped(f"Bucket {self._name} was started before members changed.")
        if self._number + 1 < len(self._phases):
            return super().advance(times)
        self.started = False
        self._await(times)
        self.arrived = True
        return False

    def renew(self) -> None:
        """The generation in which it was started has ended. Results that have arrived stay: others may count them."""
        if self.started:
            self.abandon()
            self.started = True
        self.lost = self.started or self.arrived
        self.ended = False

    def rewind(self) -> None:
        """Forgets this run: contents are as before it."""
        self.starts -= self.started or self.arrived
        self.abandon()
        self.arrived = self.lost = self.ended = False
        self._undo.restore()

    def put_back(self) -> None:
        """Contents are as before this run, and may be changed."""
        self._undo.restore()
        self._undo.saved = False

    def conclude(self) -> None:
        """The unit is committed: runs what follows the last step that communicates."""
        if not self.arrived:
            return
        self.arrived = self.lost = False
        last = self._phases[-1][1] if self._phases else None
        if last is not None and last.finish is not None:
            last.finish()
        for work in self._closing:
            work()
        for _, action in self._phases:
            if action is not None and action.commit is not None:
                action.commit()
        self._undo.saved = False
