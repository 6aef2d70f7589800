"""The module that stands for a LightningModule while it is trained: its call is a training step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, AsyncModelAverageAlgorithmImpl
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.step.parameters import IGNORE_LISTS

PREFIX = "module."


class StepModule(torch.nn.Module):
    """``module`` in a module of its own. A LightningModule calls itself within ``training_step``, and hooks on it would
    take each of these calls for a step. Names of its parameters have the prefix ``module.``, as with DDP."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        algorithm: Algorithm | None,
        flatten: bool,
        broadcast_buffers: bool,
    ) -> None:
        """Takes over rank 0's parameters, buffers and optimizers on all ranks, which exchange from now on. Raises
        BaguaError, on every rank, if models or optimizers differ.
        """
        super().__init__()
        self.module = module
        for name in IGNORE_LISTS:
            ignored = getattr(module, name, None)
            if ignored:
                setattr(self, name, [PREFIX + one.removeprefix(".") for one in ignored])
        self.exchange: BaguaDistributedDataParallel | None = BaguaDistributedDataParallel(
            self, optimizers, algorithm, gradient_as_bucket_view=flatten, broadcast_buffers=broadcast_buffers
        )

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Calls ``module``, whose forward Lightning sends on to ``training_step``."""
        return self.module(*inputs, **named)

    def begin_step(self) -> None:
        """Prepares for a training step. Validation has put this module into evaluation mode, and Lightning puts
        ``module`` alone back. A callback may have thawed parameters (``BackboneFinetuning``), or added some.
        """
        self.training = True
        if self.exchange is not None:
            self.exchange.follow_parameters()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block only accumulate on this rank."""
        assert self.exchange is not None
        return self.exchange.no_sync()

    def broadcast_buffers(self) -> None:
        """Copies rank 0's buffers to all ranks."""
        for buffer in self.module.buffers():
            bagua.broadcast(buffer, src=0)

    def end(self, alone: bool = False) -> None:
        """Makes ``module`` an ordinary one again. All ranks do it together, and asynchronous averages end with the same
        weights on all; or this one ``alone``: it then waits for no other."""
        if self.exchange is not None:
            if not alone and isinstance(self.exchange.bagua_algorithm, AsyncModelAverageAlgorithmImpl):
                self.exchange.bagua_algorithm.abort()
            self.exchange.close(alone)
            self.exchange = None
