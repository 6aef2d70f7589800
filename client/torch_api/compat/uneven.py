"""``bagua.join``: training with different numbers of batches on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from bagua.base.errors import ConfigError
from bagua.torch_api.train.model import DistributedModel, join_models


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
    for name in ("inner", "bagua_ddp"):
        if not isinstance(found, DistributedModel):
            found = getattr(model, name, found)
    if not isinstance(found, DistributedModel):
        raise ConfigError(
            f"join: {type(model).__name__} is no wrapped model. Call with_bagua on it first, or wrap it with "
            "bagua's DistributedDataParallel. [BG608]"
        )
    return found
