"""The entry of newcomers of an elastic job into the fit of a Trainer, in the middle of an epoch.

A newcomer runs ``fit`` up to its first batch, among the newcomers of its host alone. There it waits to be let in. The
others let it in when they ask for a batch: so all stand at the same line of the same loop, and the newcomer takes over
what Lightning has counted. Nothing is restarted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from bagua.base.errors import ConfigError
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.comm.plain_data import decode, encode
from bagua.torch_api.data.elastic_loader import ElasticLoader
from bagua.torch_api.job.session import current

_NUMBERS = itertools.count(1)  # fits come in the same order on all members


class EpochLoader:
    """The batches of an ``ElasticSampler``, as a Trainer takes them: as many in each epoch, whoever comes and goes.

    The sampler's epochs follow each other without a gap. When ranks are lost, samples are given out again, so such an
    epoch may end a step later than the Trainer's.
    """

    def __init__(self, loader: ElasticLoader, elastic: bool) -> None:
        """Raises ConfigError for a sampler whose epochs get longer when ranks are lost."""
        if elastic and not loader.is_steady:
            raise ConfigError(
                "A Trainer has the same number of steps in each epoch. With ElasticSampler(batch_size=…) that follows "
                "the number of ranks: give the sampler a global_batch. [BG612]"
            )
        self._elastic = elastic
        self._steps = loader.steps_of_epoch
        self._stream = loader.stream()

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        if self._elastic:
            units(current()).take_newcomers()
        return itertools.islice(self._stream, self._steps)


class FitState:
    """State of a fit that newcomers take over beside model, optimizers and sampler (a ``Carrier``)."""

    def __init__(self, trainer: Any, steps: int) -> None:
        """``steps`` of an epoch. Raises ConfigError for a Trainer that would not do the same on newcomers."""
        if trainer.reload_dataloaders_every_n_epochs:
            raise ConfigError(
                "Trainer(reload_dataloaders_every_n_epochs=…) does not work with an ElasticSampler. [BG612]"
            )
        self._trainer = trainer
        self._steps = steps
        self._taken: Any = None
        units(current()).admission.carry("fit", self, str(next(_NUMBERS)))

    def prepare(self) -> None:
        """Sets up validation, on which ranks communicate, where Lightning would do it later."""
        trainer = self._trainer
        if trainer.enable_validation and trainer.val_dataloaders is None:
            trainer.validating = True
            trainer.fit_loop.epoch_loop.val_loop.setup_data()
            trainer.training = True

    def describe(self) -> Any:
        return {
            "steps of an epoch": self._steps,
            "callbacks": [callback.state_key for callback in self._trainer.callbacks],
            "schedulers": [type(one.scheduler).__name__ for one in self._trainer.lr_scheduler_configs],
        }

    def difference(self, mine: Any, other: Any) -> str:
        return "; ".join(
            f"{name}: {mine[name]} here, {other[name]} on the others" for name in mine if mine[name] != other[name]
        )

    def give(self, tensors: list[torch.Tensor]) -> Any:
        trainer = self._trainer
        state = {
            "loops": {name: counter.state_dict() for name, counter in _counters(trainer.fit_loop)},
            "stepped": trainer.fit_loop.epoch_loop.on_save_checkpoint(),
            "callbacks": [callback.state_dict() for callback in trainer.callbacks],
            "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "validation": list(trainer.num_val_batches),
            "stop": trainer.should_stop,
        }
        return encode(state, tensors)

    def take(self, document: Any, tensors: list[torch.Tensor]) -> None:
        self._taken = decode(document, tensors)

    def taken(self) -> None:
        trainer, state, self._taken = self._trainer, self._taken, None
        for name, counter in _counters(trainer.fit_loop):
            counter.load_state_dict(state["loops"][name])
        trainer.fit_loop.epoch_loop.on_load_checkpoint(state["stepped"])
        for callback, held in zip(trainer.callbacks, state["callbacks"], strict=True):
            if held:  # most callbacks have none
                callback.load_state_dict(held)
        for one, held in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            one.scheduler.load_state_dict(held)
        trainer.precision_plugin.load_state_dict(state["precision"])
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        trainer.num_val_batches[:] = state["validation"]
        trainer.should_stop = state["stop"]


def _counters(loop: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """The counters of a loop and of the loops inside it, with their names."""
    for name, held in vars(loop).items():
        if dataclasses.is_dataclass(held) and hasattr(held, "load_state_dict"):
            yield before + name, held
        elif hasattr(held, "restarting"):  # a loop
            yield from _counters(held, f"{before}{name}.")
