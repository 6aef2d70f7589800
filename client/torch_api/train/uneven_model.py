"""A wrapped model whose ranks have different numbers of batches: see ``uneven.py``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from bagua.algorithms import AlgorithmImpl
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.train.agreement import broadcast_tensors
from bagua.torch_api.train.autograd_hooks import BackwardPasses
from bagua.torch_api.train.backward_steps import BackwardSteps
from bagua.torch_api.train.optimizer_state import broadcast_optimizers
from bagua.torch_api.train.uneven import Event, Uneven


class ShadowedModel(BackwardPasses):
    """The part of ``DistributedModel`` that a block of ``join`` calls. ``uneven``: that block; None outside of one."""

    bagua_module_name: str
    bagua_algorithm: AlgorithmImpl
    process_group: BaguaProcessGroup
    parameters_to_ignore: frozenset[str]
    uneven: Uneven | None
    _steps: BackwardSteps | None
    _adding: bool
    _begin_step: Callable[[Any], None]
    trained: Callable[[], list[tuple[str, torch.nn.Parameter]]]

    @property
    def everyone(self) -> Communicator:
        """Communicator of all ranks that train the model."""
        return self._group

    @property
    def elastic(self) -> bool:
        """True if the job goes on when ranks are lost."""
        return self._session.elastic

    @property
    def steps_in_backward(self) -> bool:
        """True if optimizers step inside backward."""
        return self._steps is not None

    @property
    def has_plain_buckets(self) -> bool:
        """True if buckets hold the model's parameters alone."""
        return self._guest.idle

    @property
    def has_buckets(self) -> bool:
        """True if any gradient is exchanged in a bucket."""
        return self._reducer is not None

    @property
    def _complete(self) -> bool:
        return self.uneven is None or self.uneven.complete

    def use_uneven(self, block: Uneven | None) -> None:
        """Notes that this model is in that block, or in none any more."""
        self.uneven = block
        if self._reducer is not None:
            self._reducer.before_exchange = None if block is None else self._tell_exchange
            self._reducer.factor = 1.0

    def _tell_exchange(self) -> None:
        assert self._reducer is not None and self.uneven is not None
        self.uneven.tell(self, Event.EXCHANGE)
        self._reducer.factor = 1.0 if self._adding else self.uneven.factor

    def forget_gradients(self) -> None:
        """Drops gradients that this rank, which has no batches left, has not exchanged."""
        for held in (self._reducer, self._sparse):
            if held is not None:
                held.forget()

    def shadow_forward(self, synced: bool) -> None:
        """Takes part in a forward pass of others."""
        with nullcontext() if synced else self.no_sync():
            self._begin_step(())

    def shadow_exchange(self) -> None:
        """Takes part in a backward pass of others, without gradients. Its result is in ``.grad`` until the next
        event."""
        assert self._reducer is not None
        self._reducer.shadow()
        if self._sparse is not None:
            self._sparse.forget()
        self._exchange()

    def take_state_of(self, root: int, with_optimizers: bool) -> None:
        """Parameters, buffers and the state of optimizers become those of the rank at this position."""
        parameters = [parameter for _, parameter in self.trained()]
        broadcast_tensors([*parameters, *self._find_buffers()], self._session, self._group, root)
        if with_optimizers:
            broadcast_optimizers(self.bagua_optimizers, self._session, self._group, root)

    def _find_buffers(self) -> list[torch.Tensor]:
        return [
            buffer
            for name, buffer in self.module.named_buffers()
            if name not in self.parameters_to_ignore and not getattr(buffer, "expert", False)
        ]
