"""State of a wrapped model that newcomers take over: parameters, buffers, optimizers, slots, algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from bagua.algorithms import AlgorithmImpl
from bagua.torch_api.train.bucket import PlanBucket
from bagua.torch_api.train.execution import Action
from bagua.torch_api.train.optimizer_state import decode_optimizer, encode_optimizer
from bagua.torch_api.train.parameters import first_difference, shared_state
from bagua.torch_api.train.runner import Runner


class Wrapped(Protocol):
    """A wrapped model. ``description``: all that must agree between ranks."""

    module: torch.nn.Module
    parameters_to_ignore: frozenset[str]
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_algorithm: AlgorithmImpl
    description: dict[str, object]

    @property
    def bagua_buckets(self) -> Sequence[PlanBucket]: ...

    def tell_newcomers(self) -> dict[str, Any]:
        """How far it is, as plain data."""
        ...

    def follow_as_newcomer(self, told: dict[str, Any]) -> None:
        """Makes tensors, buckets and plans again as another rank has them, which told this."""
        ...


def _with_residuals(bucket: PlanBucket) -> list[Action]:
    return [action for action in bucket.execution.actions if action.residual() is not None]


class ModelState:
    """See ``bagua.torch_api.comm.admission.Carrier``."""

    def __init__(self, model: Wrapped, runner: Runner) -> None:
        self._model = model
        self._runner = runner
        self._told: dict[str, Any] = {}

    def describe(self) -> dict[str, object]:
        return self._model.description

    def difference(self, mine: Any, other: Any) -> str:
        text = first_difference([other, mine])
        return text.replace("rank 0 has", "the others have").replace("rank 1 has", "this newcomer has")

    def give(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        if not self._runner.grows:
            raise TypeError(
                "It was wrapped with a process group of its own: newcomers are let into models that all ranks train."
            )
        held: list[torch.Tensor] = []
        optimizers = [encode_optimizer(optimizer, held) for optimizer in self._model.bagua_optimizers]
        tensors += self._tensors(held)
        return {
            "optimizers": optimizers,
            "model": self._model.tell_newcomers(),
            "algorithm": self._model.bagua_algorithm.tell_newcomers(),
            "communicators": self._runner.numbers,
            "residuals": [[action.residual() for action in _with_residuals(one)] for one in self._model.bagua_buckets],
        }

    def _tensors(self, of_optimizers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        model = self._model
        return [
            *(tensor for _, tensor in shared_state(model.module, model.parameters_to_ignore)),
            *of_optimizers,
            *(slot for bucket in model.bagua_buckets for slot in bucket.slots_for_newcomers),
            *(one for bucket in model.bagua_buckets for action in bucket.execution.actions for one in action.shared()),
            *model.bagua_algorithm.tensors_for_newcomers(),
        ]

    def take(self, document: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        held: list[torch.Tensor] = []
        for optimizer, told in zip(self._model.bagua_optimizers, document["optimizers"], strict=True):
            decode_optimizer(optimizer, told, held)
        self._runner.follow(document["communicators"])
        self._model.bagua_algorithm.hear_as_newcomer(document["algorithm"])
        self._model.follow_as_newcomer(document["model"])
        for bucket, residuals in zip(self._model.bagua_buckets, document["residuals"], strict=True):
            for action, (number, sides) in zip(_with_residuals(bucket), residuals, strict=True):
                action.follow((number, sides))
        self._runner.forget_residuals()
        tensors += self._tensors(held)

    def taken(self) -> None:
        """Tensors were filled where they are used."""
