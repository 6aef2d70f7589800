"""Backward passes of a wrapped model: how one begins, what happens at each gradient, and how it ends."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from bagua.algorithms.plan import GRADIENT, WEIGHT
from bagua.torch_api.comm.shards import AfterGather, fsdp_units
from bagua.torch_api.job.malloc import HeapTrimmer
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.module_hook import beside_graphs, tensors_in
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.training_step import TrainingStep, out_of_step
from bagua.torch_api.train.compat_hooks import Guest
from bagua.torch_api.train.sparse_gradients import SparseGradients
from bagua.torch_api.train.tracer import Tracer
from bagua.torch_api.train.untracked import UntrackedParameters
from bagua.torch_api.train.wrapped import Wrapped

SYNC = "require_backward_grad_sync"
"""Attribute of the module that ``with_bagua`` has wrapped, where programs set it that know no other object."""


class BackwardPass:
    """A backward pass that runs now; ``at_end`` is called when it is over, unless it ends by an exception. That needs a
    private function of torch.autograd; a test tells when it moves.

    autograd holds the callback as long as the pass lives, and nobody else does: that is how ``alive`` knows.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        """Only inside a pass."""
        callback = functools.partial(at_end)  # another one for each pass, and no frame that torch.compile would take
        self.alive: Callable[[], object | None] = weakref.ref(callback)
        torch.autograd.Variable._execution_engine.queue_callback(callback)


class BackwardPasses:
    """Backward passes of one wrapped model, which autograd's hooks tell of.

    The model sets, when it makes buckets: ``step``, ``sparse``, ``untracked``, ``trimmer``, ``parameters`` (all that
    are trained) and ``at_end``, which exchanges the gradients that there are. ``synced_by_forward``: the next pass is
    exchanged, as its forward pass was outside of ``no_sync``; None: there was none, and the moment of backward decides.
    ``accumulated``: so many gradients have come in the present pass, or the last one. ``begun``: a forward pass in
    training has begun the step of the next one that is exchanged. ``begins_after_step``: see
    ``_exchange_due``.
    """

    untracked: UntrackedParameters
    at_end: Callable[[], None]

    def __init__(
        self,
        model: Wrapped,
        session: Session,
        runner: Runner,
        tracer: Tracer,
        guest: Guest,
        begin_late: Callable[[], None],
    ) -> None:
        """``begin_late``: begins a step of the model that no forward pass has begun."""
        self._model = model
        self._session = session
        self._runner = runner
        self._tracer = tracer
        self._guest = guest
        self._begin_late = begin_late
        self.step: TrainingStep | None = None
        self.sparse: SparseGradients | None = None
        self.trimmer: HeapTrimmer | None = None
        self._pass: BackwardPass | None = None
        self._out_of_step = False  # other ranks may count a pass that this one did not end
        self._synced = True
        self.synced_by_forward: bool | None = None
        self.accumulated = 0
        self.parameters: list[torch.nn.Parameter] = []
        self._weight = 1.0  # of the gradients of this pass
        self._weight_hooks: list[Any] = []
        self._weighed: set[torch.Tensor] = set()
        session.weighed_models.add(self)
        self.begun = self.begins_after_step = False

    @property
    def under_way(self) -> bool:
        """True if a backward pass of this model runs now; False after one that ended by an exception."""
        return self._pass is not None and self._pass.alive() is not None

    @property
    def exchanges(self) -> bool:
        """True if a backward pass now would exchange anything."""
        return bool(self._model.module.__dict__.get(SYNC, True))

    @exchanges.setter
    def exchanges(self, wanted: bool) -> None:
        self._model.module.__dict__[SYNC] = wanted

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this block only accumulate on this rank; the next one outside exchanges the whole."""
        before, self.exchanges = self.exchanges, False
        try:
            yield
        finally:
            self.exchanges = before

    def check(self) -> None:
        """Forgets a pass that has ended by an exception."""
        if self._pass is not None and not self._pass.alive():
            self._abandon()

    def after_forward(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        """The gradient of an output is the first sign of backward, and comes in its outermost pass."""
        if self._tracer.recording is not None:
            self._tracer.recording.enclose(self._model, "forward", begin=False)
        if torch.is_grad_enabled():
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_gradient)  # type: ignore[no-untyped-call]

    @beside_graphs
    def _before_gradient(self, _: torch.Tensor) -> None:
        """Begins the pass, unless it is under way."""
        if not self.under_way:
            self._begin()

    def install_weights(self) -> None:
        """Weighs gradients at the parameters, where each passes once: outputs of the model may depend on each other, as
        a loss does on logits beside it. Nothing if that is done, and for a model that is closed."""
        if self.parameters and not self._weight_hooks:
            self._weighed = set(self.parameters)
            for one in self.parameters:
                self._weight_hooks.append(one.register_hook(self._weigh))  # type: ignore[no-untyped-call]
            for unit in fsdp_units(self._model.module):  # which puts others in the place of its parameters in a pass
                self._weight_hooks.append(AfterGather(unit, self._weigh_whole))

    def remove_weights(self) -> None:
        """Removes the hooks of ``install_weights``, which installs none before there are ``parameters`` again."""
        for handle in self._weight_hooks:
            handle.remove()
        self._weight_hooks.clear()
        self._weighed.clear()
        self.parameters = []

    @beside_graphs
    def _weigh(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Weighs all gradients of a pass alike, though members may change meanwhile: ``TrainingStep.finish`` follows
        such changes for the pass as a whole."""
        if not self.under_way:
            self._begin()
        return None if self._weight == 1.0 else gradient * self._weight

    def _weigh_whole(self, unit: torch.nn.Module) -> None:
        """Weighs gradients of the whole parameters that a unit of FSDP computes with, which stay the same tensors."""
        for one in unit.parameters():
            if one.requires_grad and one not in self._weighed:
                self._weighed.add(one)
                self._weight_hooks.append(one.register_hook(self._weigh))  # type: ignore[no-untyped-call]

    @beside_graphs
    def after_gradient(
        self,
        on_gradient: Callable[[str, torch.nn.Parameter], None],
        name: str,
        parameter: torch.nn.Parameter,
    ) -> None:
        """A gradient has been accumulated: ``on_gradient`` is told, if the pass is exchanged."""
        if self._pass is None or not self._pass.alive():
            self._begin()
        self.accumulated += 1
        if self._synced:
            on_gradient(name, parameter)

    def _begin(self) -> None:
        if self._pass is not None or self._out_of_step:
            self._abandon()
        self.untracked.refuse()
        self.accumulated = 0
        # In this order: another thread may enter a generation in between, whose weights this pass may have, but not it.
        generation, weights = self._session.connection.settled, self._session.weights
        self._weight = weights.batch
        self._synced = self.exchanges if self.synced_by_forward is None else self.synced_by_forward
        self.synced_by_forward = None
        if self._session.elastic:
            if self.step is not None:
                self.step.begin_pass(generation, weights.changes)
            if self.sparse is not None:
                self.sparse.weigh(weights.changes)
        if self._synced:
            self._session.connection.note_pass()
        self._pass = BackwardPass(self._end_behind_fsdp if self._model.is_sharded else self._end)
        if self._tracer.recording is not None:
            self._tracer.recording.backward(self._model, begin=True)

    def _end_behind_fsdp(self) -> None:
        """Ends the pass behind FSDP's own callback, which may come after this one, and brings gradients of units whose
        inputs need none."""
        self._pass = BackwardPass(self._end)

    @beside_graphs
    def _end(self) -> None:
        ended, self._pass = self._pass, None
        # A pass without a gradient (``autograd.grad``), which one rank, or island, may make alone, is not that of the
        # step. On a rank of an island that holds no part of a parameter its hook is called, too.
        if self._synced and (self.accumulated or not self._guest.idle):
            try:
                self._exchange_due()
            except BaseException as error:  # the next pass forgets this one, and refuses if others may count it
                if self._model.exchanged == GRADIENT:
                    self._pass = ended
                    self._out_of_step = not isinstance(error, Exception)  # Ctrl-C
                raise
        self.untracked.refuse_unlike(self.accumulated)
        if self._tracer.recording is not None:
            self._tracer.recording.backward(self._model, begin=False, synchronised=self._synced)
        if self.trimmer is not None:
            self.trimmer.after_pass()

    def _exchange_due(self) -> None:
        """Exchanges at the end of a pass, and begins the step of one that no call of the model in training mode began
        (a method was called, or the model is in evaluation mode).

        An exchange of weights has its result before the pass ends: its step begins before it. Where gradients are
        exchanged, hooks of the pass have begun with it: what begins with a step, such as the end of a warm-up, does so
        after the optimizer's."""
        late, self.begun = self.accumulated > 0 and not self.begun, False
        if late and self._model.exchanged == WEIGHT:
            self._begin_late()
        with torch.no_grad():
            self.at_end()
        if late and self._model.exchanged == GRADIENT:
            self.begins_after_step = True
            if not self._model.bagua_optimizers:  # no optimizer's step will follow
                self._begin_late()

    def _abandon(self) -> None:
        """The pass before this one ended by an exception."""
        self._pass = None
        under_way = self._guest.abandon()
        if self.step is not None:
            under_way = self.step.abandon() or under_way
        if self.sparse is not None:
            self.sparse.abandon()
        self._out_of_step = self._out_of_step or under_way
        if self._out_of_step and self._runner.everyone.nranks() > 1:  # a rank alone is in step with itself
            raise out_of_step()
        if self._model.exchanged == WEIGHT and self._synced:
            self._exchange_due()  # the exchange of weights does not depend on that pass's gradients
