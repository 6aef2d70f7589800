"""Backward passes of a wrapped model: how one begins, what happens at each gradient, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bagua.algorithms.plan import GRADIENT, WEIGHT
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.join.malloc import HeapTrimmer
from bagua.torch_api.join.session import Session
from bagua.torch_api.step.module_hook import beside_graphs, tensors_in
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.training_step import TrainingStep
from bagua.torch_api.train.backward_pass import BackwardPass
from bagua.torch_api.train.compat_hooks import Guest
from bagua.torch_api.train.newcomers import Newcomers
from bagua.torch_api.train.sparse_gradients import SparseGradients
from bagua.torch_api.train.tracer import Tracer
from bagua.torch_api.train.uneven import Uneven

SYNC = "require_backward_grad_sync"
"""Attribute of the module that ``with_bagua`` has wrapped, where programs set it that know no other object."""


class BackwardPasses:
    """The part of ``DistributedModel`` that hooks of autograd call. ``_on_backward_end``: the algorithm's hook.
    ``_synced``: the present pass, or the last one, is exchanged. ``_accumulated``: so many gradients have come in it.
    ``_begun``: a forward pass in training has begun the step of the next one that is exchanged. ``_begins_after_step``:
    see ``_exchange_late``."""

    module: torch.nn.Module
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_train_step_counter: int
    exchanged: str
    _session: Session
    _runner: Runner
    _tracer: Tracer
    _guest: Guest
    _reducer: TrainingStep | None
    _sparse: SparseGradients | None
    _pass: BackwardPass | None
    _synced: bool
    _accumulated: int
    _begun: bool
    _begins_after_step: bool
    _newcomers: Newcomers
    _trimmer: HeapTrimmer | None
    _begin_step: Callable[[Any], None]
    uneven: Uneven | None
    _on_backward_end: Callable[[], None]

    @property
    def _group(self) -> Communicator:
        return self._runner.everyone

    @property
    def in_backward(self) -> bool:
        """True if a backward pass of this model runs now."""
        return self._pass is not None

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward pass now would exchange anything. Programs set it as they set that of torch's DDP."""
        return bool(self.module.__dict__.get(SYNC, True))

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self.module.__dict__[SYNC] = wanted

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block only accumulate on this rank; the next one outside exchanges the whole."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _after_forward(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        """The gradient of an output is the first sign of backward, and comes in its outermost pass."""
        if self._tracer.recording is not None:
            self._tracer.recording.enclose(self, "forward", begin=False)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_gradient)  # type: ignore[no-untyped-call]

    @beside_graphs
    def _before_gradient(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Begins the pass. What follows from this gradient is weighted by the rank's share of the samples."""
        if self._pass is None or not self._pass.alive():
            self._begin_pass()
        weight = self._session.batch_weight
        return None if weight == 1.0 else gradient * weight

    @beside_graphs
    def _after_gradient(
        self,
        on_gradient: Callable[[str, torch.nn.Parameter], None],
        name: str,
        parameter: torch.nn.Parameter,
    ) -> None:
        if self._pass is None or not self._pass.alive():
            self._begin_pass()
        self._accumulated += 1
        if self._synced:
            on_gradient(name, parameter)

    def _begin_pass(self) -> None:
        if self._pass is not None:
            self._abandon_pass()
        self._newcomers.refuse()
        self._accumulated = 0
        self._synced = self.require_backward_grad_sync
        if self._session.elastic:
            if self._reducer is not None:
                self._reducer.weigh()
            if self._sparse is not None:
                self._sparse.weigh()
        if self._synced:
            self._session.connection.note_pass()
        self._pass = BackwardPass(self._end_pass)
        if self._tracer.recording is not None:
            self._tracer.recording.backward(self, begin=True)

    @beside_graphs
    def _end_pass(self) -> None:
        self._pass = None
        if self._synced:
            self._exchange_due()
        self._newcomers.refuse_unlike(self._accumulated)
        if self._tracer.recording is not None:
            self._tracer.recording.backward(self, begin=False, synchronised=self._synced)
        if self._trimmer is not None:
            self._trimmer.after_pass()

    def _exchange_due(self) -> None:
        late, self._begun = self._accumulated > 0 and not self._begun, False
        if late:
            self._exchange_late()
        else:
            self._exchange()

    def _exchange_late(self) -> None:
        """The end of an exchanged pass that no call of the model in training mode began (a method was called, or the
        model is in evaluation mode), so that the beginning of its step is here: that of an exchange of weights, which
        has its result at once, before the pass ends. Where gradients are exchanged, hooks of the pass have begun with
        it, so what begins there, such as the end of a warm-up, does so after the optimizer's step. ``autograd.grad``,
        which one rank may call alone, begins nothing."""
        if self.exchanged == WEIGHT:
            self._begin_late()
        self._exchange()
        if self.exchanged == GRADIENT:
            self._begins_after_step = True
            if not self.bagua_optimizers:
                self._begin_late()

    def _exchange(self) -> None:
        with torch.no_grad():
            if self._sparse is None:
                self._on_backward_end()
            else:
                self._sparse.finish_after(self._on_backward_end)

    def _begin_late(self) -> None:
        """Begins the step late, but not while ranks have different numbers of batches: those without any would have to
        be told."""
        if self.uneven is None:
            self._begins_after_step = False
            with torch.enable_grad():
                self._begin_step(())

    def _abandon_pass(self) -> None:
        """The pass before this one ended by an exception."""
        self._pass = None
        under_way = self._guest.abandon()
        if self._reducer is not None:
            under_way = self._reducer.abandon() or under_way
        if self._sparse is not None:
            self._sparse.abandon()
        if under_way and self._group.nranks() > 1:
            raise BaguaError(
                "The last backward pass ended by an exception after part of its gradients had been exchanged. The "
                "ranks are no longer in step: start the job again (in a notebook: launch again), and catch such "
                "exceptions before backward begins. "
                "[BG604]"
            )
        if self.exchanged == WEIGHT and self._synced:
            self._exchange_due()  # the exchange of weights does not depend on that pass's gradients
