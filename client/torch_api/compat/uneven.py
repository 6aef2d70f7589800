"""Training with different numbers of batches on ranks: ``bagua.join``, and wrapped models in
``torch.distributed.algorithms.Join``, beside DDP, ZeroRedundancyOptimizer and others.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from bagua.base.errors import ConfigError
from bagua.torch_api.comm.groups import to_torch_group
from bagua.torch_api.train.model import DistributedModel, join_models
from bagua.torch_api.train.uneven import Event, Uneven, UnevenModel, refuse


def join(
    models: Any,
    *,
    divide_by_initial_world_size: bool = True,
    enable: bool = True,
    throw_on_early_termination: bool = False,
) -> AbstractContextManager[object]:
    """A block around a loop over batches, of which ranks have different numbers, as ``join`` of torch's DDP.

        with bagua.join(model):
            for inputs, labels in loader:
                ...

    A rank that has left the loop takes part in the others' exchanges with zeros ("shadows" them), until the last rank
    has left it. Then parameters, buffers, and the state of the optimizers given to ``with_bagua``, become on all ranks
    those of the first of the ranks that had batches to the end. In the block each forward pass in training, and each
    backward pass that is exchanged, costs one more all-gather of 8 bytes a rank.

    Args:
        models: A model with ``with_bagua`` called on it, a ``DistributedDataParallel``, or a list of them. Passes of
            several models may come in any order that is the same on all ranks.
        divide_by_initial_world_size: A gradient is the sum over ranks, divided by the number of all ranks (True), or of
            those that still have batches (False). It has no meaning for algorithms that add gradients up.
        enable: False: the block does nothing.
        throw_on_early_termination: All ranks raise BaguaError as soon as one has no batches left. Models that
            communicate in forward (SyncBatchNorm, experts) need it.

    Its beginning raises ConfigError, alike on all ranks, for models whose exchanges can't be shadowed: in elastic jobs,
    with ``step_in_backward``, with algorithms that exchange weights or keep moments of Adam.

    The program's own collectives in the block are not shadowed. A gradient that a rank has accumulated, and not
    exchanged, when it leaves the loop is dropped. Accumulate inside of ``no_sync``. A tuner rests while a rank shadows.
    """
    named = list(models) if isinstance(models, Sequence) else [models]
    if not named:
        raise ConfigError("join: name at least one model. [BG608]")
    return join_models(
        [_wrapped(one) for one in named], divide_by_initial_world_size, enable, throw_on_early_termination
    )


def _wrapped(model: Any) -> DistributedModel:
    found = model
    for name in ("inner", "bagua_ddp"):  # a DistributedDataParallel, and a module after with_bagua
        if not isinstance(found, DistributedModel):
            found = getattr(model, name, found)
    if not isinstance(found, DistributedModel):
        raise ConfigError(
            f"join: {type(model).__name__} is no wrapped model. Call with_bagua on it first, or wrap it with "
            "bagua's DistributedDataParallel. [BG608]"
        )
    return found


# torch's Join asks, once in each iteration, whether ranks have batches left; those that have none then run one hook of
# each object in its list. Our hook takes part in all events of the model until gradients are exchanged.

_NUMBERS = itertools.count(1)  # of models in such blocks: ranks make them in the same order


class JoinableModel(Joinable):
    """An object that trains a wrapped model, as ``Join`` needs it."""

    def __init__(self) -> None:
        Joinable.__init__(self)

    @abstractmethod
    def _model(self) -> DistributedModel:
        """The wrapped model."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook for ``Join``. ``kwargs``: its own; ``divide_by_initial_world_size`` counts, see
        ``bagua.join``. Raises ConfigError for a model whose exchanges can't be shadowed."""
        model = self._model().shadow
        model.use_uneven(None)  # a block before ended by an exception
        block = _Iterations(self, model, bool(kwargs.get("divide_by_initial_world_size", True)))
        block.__enter__()
        return _Hook(block)

    @property
    def join_device(self) -> torch.device:
        """Device on which ``Join`` has its own tensors: that of the parameters."""
        return next(parameter.device for parameter in self._model().module.parameters())

    @property
    def join_process_group(self) -> Any:
        """Group of ``torch.distributed`` with the model's ranks. Raises ConfigError where there is none with the
        model's ranks."""
        ours = self._model().process_group
        if not distributed.is_available() or not distributed.is_initialized():
            raise ConfigError(
                "Join: torch.distributed is not initialized, and torch's Join communicates there. Call "
                "bagua.init_process_group() without BAGUA_TORCH_DISTRIBUTED=0, or take bagua.join(model). [BG608]"
            )
        group = distributed.group.WORLD if len(ours.ranks) == distributed.get_world_size() else to_torch_group(ours)
        if group is None:
            raise ConfigError(
                "Join: the model is trained by some of the ranks, which are no group of torch.distributed. Make it by "
                "torch.distributed.new_group() and pass that as process_group, or take bagua.join(model). [BG608]"
            )
        return group


class _Iterations(Uneven):
    """The block on one rank. An iteration begins with the first event of the model, and ends with an exchange."""

    def __init__(self, joinable: JoinableModel, model: UnevenModel, divide_by_initial_world_size: bool) -> None:
        super().__init__([model], divide_by_initial_world_size, False, first=next(_NUMBERS))
        self._joinable = joinable
        self._begun = False
        self._between = True
        self._left = False

    def _refuse(self, model: UnevenModel) -> None:
        refuse(model, throws=True)  # the rest when ``Join`` has told what it does at an early end

    def tell(self, model: UnevenModel, event: Event) -> None:
        if not self._begun:
            chosen = self._joinable._join_config  # Join sets it after it has asked for the hook
            if not chosen.enable:
                return model.use_uneven(None)
            refuse(model, chosen.throw_on_early_termination)
            self._begun = True
        if self._between:
            work = Join.notify_join_context(self._joinable)
            if work is not None:
                work.wait()
        super().tell(model, event)
        self._between = event == Event.EXCHANGE

    def shadow_iteration(self) -> None:
        """Takes part in an iteration of the others, when this rank has no batches left."""
        if not self._left:
            self.forget_gradients()
            self._left = True
        while self.shadow() not in (Event.EXCHANGE, None):
            pass

    def leave(self) -> None:
        """No rank has batches left."""
        self.end()
        for model in self._models:
            model.use_uneven(None)


class _Hook(JoinHook):
    def __init__(self, block: _Iterations) -> None:
        self._block = block

    def main_hook(self) -> None:
        self._block.shadow_iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._block.leave()
