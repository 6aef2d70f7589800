"""A wrapped model whose ranks have different numbers of batches: see ``uneven.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from bagua.algorithms import AlgorithmImpl
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.agreement import broadcast_tensors
from bagua.torch_api.train.autograd_hooks import BackwardPasses
from bagua.torch_api.train.compat_hooks import Guest
from bagua.torch_api.train.optimizer_state import broadcast_optimizers
from bagua.torch_api.train.uneven import Event, Uneven
from bagua.torch_api.train.wrapped import Wrapped


class UnevenModel:
    """A wrapped model, as a block of ``join`` calls it: see ``Joinable``. ``uneven``: that block; None outside of one.
    ``adding``: results grow with the number of ranks."""

    def __init__(
        self,
        model: Wrapped,
        session: Session,
        runner: Runner,
        guest: Guest,
        passes: BackwardPasses,
        begin_step: Callable[[Any], None],
    ) -> None:
        self._model = model
        self._session = session
        self._runner = runner
        self._guest = guest
        self._passes = passes
        self._begin_step = begin_step
        self.uneven: Uneven | None = None
        self.adding = False

    @property
    def module(self) -> torch.nn.Module:
        return self._model.module

    @property
    def bagua_module_name(self) -> str:
        return self._model.bagua_module_name

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        return self._model.bagua_algorithm

    @property
    def bagua_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._model.bagua_optimizers

    @property
    def process_group(self) -> BaguaProcessGroup:
        return self._model.process_group

    @property
    def everyone(self) -> Communicator:
        return self._runner.everyone

    @property
    def elastic(self) -> bool:
        return self._session.elastic

    @property
    def steps_in_backward(self) -> bool:
        return self._model.steps_in_backward

    @property
    def has_plain_buckets(self) -> bool:
        return self._guest.idle

    @property
    def has_buckets(self) -> bool:
        return self._passes.step is not None

    @property
    def complete(self) -> bool:
        """True if all ranks had batches at the last event."""
        return self.uneven is None or self.uneven.complete

    def use_uneven(self, block: Uneven | None) -> None:
        self.uneven = block
        if self._passes.step is not None:
            self._passes.step.before_exchange = None if block is None else self._tell_exchange
            self._passes.step.factor = 1.0

    def _tell_exchange(self) -> None:
        assert self._passes.step is not None and self.uneven is not None
        self.uneven.tell(self, Event.EXCHANGE)
        self._passes.step.factor = 1.0 if self.adding else self.uneven.factor

    def tell_forward(self) -> None:
        """Tells the block, if there is one, that a forward pass begins."""
        if self.uneven is not None:
            self.uneven.tell(self, Event.FORWARD if self._passes.exchanges else Event.FORWARD_UNSYNCED)

    def forget_gradients(self) -> None:
        for held in (self._passes.step, self._passes.sparse):
            if held is not None:
                held.forget()

    def shadow_forward(self, synced: bool) -> None:
        with nullcontext() if synced else self._passes.no_sync():
            self._begin_step(())

    def shadow_exchange(self) -> None:
        """Takes part in a backward pass of others, without gradients. Its result is in ``.grad`` until the next
        event."""
        assert self._passes.step is not None
        self._passes.step.shadow()
        if self._passes.sparse is not None:
            self._passes.sparse.forget()
        self._passes.exchange()

    def take_state_of(self, root: int, with_optimizers: bool) -> None:
        parameters = [parameter for _, parameter in self._model.trained()]
        broadcast_tensors([*parameters, *buffers_of(self._model)], self._session, self.everyone, root)
        if with_optimizers:
            broadcast_optimizers(self.bagua_optimizers, self._session, self.everyone, root)


def buffers_of(model: Wrapped) -> list[torch.Tensor]:
    """Returns the buffers that are the same on all ranks."""
    return [
        buffer
        for name, buffer in model.module.named_buffers()
        if name not in model.parameters_to_ignore and not getattr(buffer, "expert", False)
    ]
