"""``join``: ranks with fewer batches than others take part in the exchanges of those that still have some.

Each rank tells all others, in one small all-gather, which event of which model comes next: a forward pass in training,
or the first gradient of a pass that is exchanged. A rank that has left the block tells that it has none, learns the
others' event, and does its part with zeros ("shadows" it), until nobody has batches left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import IntEnum
from types import TracebackType
from typing import Any

import torch

from bagua.algorithms.plan import GRADIENT
from bagua.base.errors import BaguaError, CommunicationError, ConfigError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.agreement import broadcast_tensors
from bagua.torch_api.train.autograd_hooks import BackwardPasses
from bagua.torch_api.train.compat_hooks import Guest
from bagua.torch_api.train.optimizer_state import broadcast_optimizers
from bagua.torch_api.train.wrapped import Wrapped


class Event(IntEnum):
    """Event of an active rank which others shadow."""

    FORWARD = 0
    FORWARD_UNSYNCED = 1  # inside of no_sync
    EXCHANGE = 2


class UnevenModel:
    """One wrapped model in a block of ``join``. ``uneven``: that block; None outside of one. ``adding``: results grow
    with the number of ranks."""

    def __init__(
        self,
        model: Wrapped,
        session: Session,
        runner: Runner,
        guest: Guest,
        passes: BackwardPasses,
        begin_step: Callable[[Any], None],
    ) -> None:
        self.wrapped = model
        self.session = session
        self._runner = runner
        self.guest = guest
        self.passes = passes
        self._begin_step = begin_step
        self.uneven: Uneven | None = None
        self.adding = False

    @property
    def everyone(self) -> Communicator:
        return self._runner.everyone

    @property
    def complete(self) -> bool:
        """True if all ranks had batches at the last event."""
        return self.uneven is None or self.uneven.complete

    def use_uneven(self, block: Uneven | None) -> None:
        """This model is in that block from now on, or in none."""
        self.uneven = block
        if self.passes.step is not None:
            self.passes.step.before_exchange = None if block is None else self._tell_exchange
            self.passes.step.factor = 1.0

    def _tell_exchange(self) -> None:
        assert self.passes.step is not None and self.uneven is not None
        self.uneven.tell(self, Event.EXCHANGE)
        self.passes.step.factor = 1.0 if self.adding else self.uneven.factor

    def tell_forward(self) -> None:
        """Tells the block, if there is one, that a forward pass begins."""
        if self.uneven is not None:
            self.uneven.tell(self, Event.FORWARD if self.passes.exchanges else Event.FORWARD_UNSYNCED)

    def forget_gradients(self) -> None:
        """Drops gradients that this rank, which has no batches left, has not exchanged."""
        for held in (self.passes.step, self.passes.sparse):
            if held is not None:
                held.clear_gradients()

    def shadow_forward(self, synced: bool) -> None:
        """Takes part in a forward pass of others."""
        with nullcontext() if synced else self.passes.no_sync():
            self._begin_step(())

    def shadow_exchange(self) -> None:
        """Takes part in a backward pass of others, without gradients. Its result is in ``.grad`` until the next
        event."""
        assert self.passes.step is not None
        self.passes.step.shadow()
        if self.passes.sparse is not None:
            self.passes.sparse.clear_gradients()
        with torch.no_grad():
            self.passes.at_end()

    def take_state_of(self, root: int, with_optimizers: bool) -> None:
        """Parameters, buffers and the state of optimizers become those of the rank at this position."""
        parameters = [parameter for _, parameter in self.wrapped.trained()]
        broadcast_tensors([*parameters, *buffers_of(self.wrapped)], self.session, self.everyone, root)
        if with_optimizers:
            broadcast_optimizers(self.wrapped.bagua_optimizers, self.session, self.everyone, root)


class Uneven:
    """The block ``with join(...)`` on one rank; ``active``: positions of the ranks that still had batches when one told
    its event last. ``process_group`` of all models must have the same ranks."""

    def __init__(
        self,
        models: Sequence[UnevenModel],
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
        first: int = 0,
    ) -> None:
        """``first``: number of the first model among those of other blocks at the same time."""
        self._models = list(models)
        self._by_initial = divide_by_initial_world_size
        self._throws = throw_on_early_termination
        self._first = first
        self.active: list[int] = []

    def __enter__(self) -> Uneven:
        """Raises ConfigError, alike on all ranks, for a model whose exchanges can't be shadowed."""
        for model in self._models:
            self._refuse(model)  # all checks come before any model is in the block
        ranks = {tuple(model.wrapped.process_group.ranks) for model in self._models}
        if len(ranks) > 1:
            raise ConfigError(
                "join: the models are trained by different groups of ranks. Join each group's by itself. [BG608]"
            )
        busy = [model for model in self._models if model.uneven is not None]
        if busy or len(set(map(id, self._models))) < len(self._models):
            raise ConfigError(
                "join: a model is in such a block already. Name each model once, and don't nest blocks. [BG608]"
            )
        self.active = list(range(self._group.nranks()))
        for model in self._models:
            model.use_uneven(self)
        return self

    def _refuse(self, model: UnevenModel) -> None:
        refuse(model, self._throws)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._group.nranks() > 1:
                self._shadow_others()
        finally:
            for model in self._models:
                model.use_uneven(None)

    @property
    def _group(self) -> Communicator:
        return self._models[0].everyone

    @property
    def complete(self) -> bool:
        """True if no rank had used up its batches at the last event."""
        return len(self.active) == self._group.nranks()

    @property
    def root(self) -> int:
        """Position of the rank whose buffers count: the first that has batches."""
        return self.active[0]

    @property
    def factor(self) -> float:
        """A mean over all ranks becomes the one that was asked for, multiplied by it."""
        return 1.0 if self._by_initial else self._group.nranks() / len(self.active)

    def tell(self, model: UnevenModel, event: Event) -> None:
        """Tells that this rank is at this event. Raises BaguaError, on all ranks, if one has no batches left and that
        was to be an error; CommunicationError if others are at another event."""
        if self._group.nranks() == 1:
            return
        index = next(index for index, one in enumerate(self._models) if one is model)
        self._meet(1 + len(Event) * (self._first + index) + event)  # 0 means that no batches are left

    def _meet(self, code: int) -> int:
        """Tells all others; returns the code of those that are active, 0 if none is."""
        group = self._group
        own, everyone = torch.tensor([code], device="cpu"), torch.zeros(group.nranks(), dtype=torch.int64, device="cpu")
        group.allgather(own, everyone)
        codes = everyone.tolist()
        active = [position for position, one in enumerate(codes) if one]
        if not active:
            return 0
        self.active = active
        if self._throws and not self.complete:
            done = ", ".join(str(group.ranks[position]) for position, one in enumerate(codes) if not one)
            raise BaguaError(f"join: no batches are left on rank {done}, and throw_on_early_termination=True. [BG608]")
        told = {codes[position] for position in active}
        if len(told) > 1:
            raise CommunicationError(
                "join: ranks do different things: "
                + "; ".join(f"rank {group.ranks[position]} is at {self._text(codes[position])}" for position in active)
                + ". All ranks must run the same passes of the same models for each batch. [BG608]"
            )
        return int(told.pop())

    def _text(self, code: int) -> str:
        number, event = divmod(code - 1, len(Event))
        words = {0: "a forward pass", 1: "a forward pass inside of no_sync", 2: "a backward pass"}[event]
        return f"{words} of model {number - self._first + 1}" if len(self._models) > 1 else words

    def _shadow_others(self) -> None:
        self.forget_gradients()
        while self.shadow() is not None:
            pass
        self.end()

    def forget_gradients(self) -> None:
        """Drops what this rank, which has no batches left, has accumulated and not exchanged."""
        for model in self._models:
            model.forget_gradients()

    def shadow(self) -> Event | None:
        """Does this rank's part in the next event of the ranks that have batches; None: no rank has."""
        code = self._meet(0)
        if not code:
            return None
        number, event = divmod(code - 1, len(Event))
        # Another model of torch's Join, which has blocks of its own.
        if not 0 <= number - self._first < len(self._models):
            raise CommunicationError(
                "join: the other ranks train another model now than the one that this rank takes part in. Name models "
                "in the order in which a step uses them. [BG608]"
            )
        model = self._models[number - self._first]
        if event == Event.EXCHANGE:
            model.shadow_exchange()
        else:
            model.shadow_forward(synced=event == Event.FORWARD)
        return Event(event)

    def end(self) -> None:
        """No rank has batches left: all take the state of the first of those that were the last to have some."""
        self.forget_gradients()
        for model in self._models:
            # Where none was done early, optimizers have stepped alike.
            model.take_state_of(self.root, with_optimizers=not self.complete)


def buffers_of(model: Wrapped) -> list[torch.Tensor]:
    """Returns the buffers that are the same on all ranks."""
    return [
        buffer
        for name, buffer in model.module.named_buffers()
        if name not in model.parameters_to_ignore and not getattr(buffer, "expert", False)
    ]


def refuse(model: UnevenModel, throws: bool) -> None:
    """Raises ConfigError with words if other ranks can't shadow what this model exchanges. ``throws``: they need
    not."""
    # The name ends with a number of the object, which means nothing to people.
    name = model.wrapped.bagua_module_name.rpartition("_")[0] or model.wrapped.bagua_module_name
    words = (
        next((words for applies, words in REFUSALS if applies(model)), None)
        or model.wrapped.bagua_algorithm.refuses_join
    )
    if words is None and not throws:
        words = next((words for applies, words in IN_FORWARD if applies(model)), None)
    if words is not None:
        raise ConfigError(f"join: {name} can't be trained with uneven numbers of batches: {words} [BG608]")


def _has(model: UnevenModel, kind: str) -> bool:  # by name: torch's class of this name does the same
    return any(type(module).__name__ == kind for module in model.wrapped.module.modules())


REFUSALS: Sequence[tuple[Callable[[UnevenModel], bool], str]] = (
    (
        lambda model: model.session.elastic,
        "in an elastic job a step counts on all ranks or on none. Take bagua.contrib.ElasticSampler: it deals out all "
        "samples, also where they are uneven.",
    ),
    (
        lambda model: model.wrapped.is_sharded,
        "ranks of an island run the same passes. Give all ranks as many batches, as bagua.contrib.ElasticSampler does.",
    ),
    (
        lambda model: model.wrapped.steps_in_backward,
        "with step_in_backward=True parameters move inside backward, also on ranks without batches. Leave it out.",
    ),
    (
        lambda model: not model.guest.idle,
        "its algorithm registers tensors of its own, as programs of the original do.",
    ),
    (
        lambda model: model.wrapped.bagua_algorithm.exchanged == GRADIENT and model.passes.step is None,
        "all its gradients are sparse, or it has none. Make one of its embeddings with sparse=False.",
    ),
    (
        lambda model: any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in model.wrapped.bagua_optimizers),
        "LBFGS needs the mean loss of all ranks in each step. Take another optimizer.",
    ),
)
"""The same on all ranks."""

IN_FORWARD: Sequence[tuple[Callable[[UnevenModel], bool], str]] = (
    (
        lambda model: _has(model, "SyncBatchNorm"),
        "SyncBatchNorm communicates in forward, which a rank without batches does not run. Pass "
        "throw_on_early_termination=True, or take BatchNorm.",
    ),
    (
        lambda model: any(getattr(parameter, "expert", False) for parameter in model.wrapped.module.parameters()),
        "experts communicate in forward, which a rank without batches does not run. Pass "
        "throw_on_early_termination=True.",
    ),
)
