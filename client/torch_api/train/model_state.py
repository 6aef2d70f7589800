"""State of a wrapped model that newcomers take over, and that checkpoints hold: parameters, buffers, optimizers, slots,
algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bagua.algorithms import AlgorithmImpl
from bagua.torch_api.comm.checkpoint_state import Kept, Path, Tensors
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.comm.shards import is_sharded, local_part, show_parts
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.step.execution import Action
from bagua.torch_api.step.parameters import describe_optimizers, first_difference, shared_state
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.optimizer_state import (
    decode_experts,
    decode_optimizer,
    encode_experts,
    encode_optimizer,
    optimizer_paths,
)
from bagua.torch_api.train.wrapped import Wrapped

OF_PROGRAM = ("model", "optimizer")
"""First names of tensors that are no algorithm's."""


def _with_residuals(bucket: PlanBucket) -> list[Action]:
    return [action for action in bucket.execution.actions if action.residual() is not None]


class ModelState:
    """See ``bagua.torch_api.comm.admission.Carrier``, and ``bagua.torch_api.comm.checkpoint_state.Keeper``."""

    def __init__(self, model: Wrapped, runner: Runner) -> None:
        self._model = model
        self._runner = runner
        self._anew = False  # the state that is loaded is that of another algorithm

    def describe(self) -> dict[str, object]:
        # A program may have added groups since it was wrapped.
        return {**self._model.description, "optimizers": describe_optimizers(self._model.bagua_optimizers)}

    def difference(self, mine: Any, other: Any) -> str:
        text = first_difference([other, mine])
        return text.replace("rank 0 has", "the others have").replace("rank 1 has", "this newcomer has")

    def give(self, tensors: list[torch.Tensor]) -> dict[str, Any]:
        if not self._runner.grows:
            raise TypeError(
                "It was wrapped with a process group of its own: newcomers are let into models that all ranks train. "
                "[BG616]"
            )
        show_parts(self._model.module)
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
            *(local_part(tensor) for _, tensor in shared_state(model.module, model.parameters_to_ignore)),
            *of_optimizers,
            *(slot for bucket in model.bagua_buckets for slot in bucket.slots_for_newcomers),
            *(one for bucket in model.bagua_buckets for action in bucket.execution.actions for one in action.shared()),
            *model.bagua_algorithm.tensors_for_newcomers(),
        ]

    def take(self, document: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        show_parts(self._model.module)
        held: list[torch.Tensor] = []
        for optimizer, told in zip(self._model.bagua_optimizers, document["optimizers"], strict=True):
            decode_optimizer(optimizer, told, held)
        self._runner.follow(document["communicators"])  # buckets are made of these communicators below
        self._model.bagua_algorithm.hear_as_newcomer(document["algorithm"])
        self._model.follow_as_newcomer(document["model"])
        for bucket, residuals in zip(self._model.bagua_buckets, document["residuals"], strict=True):
            for action, (number, sides) in zip(_with_residuals(bucket), residuals, strict=True):
                action.follow((number, sides))
        self._runner.forget_residuals()
        tensors += self._tensors(held)  # in the order of ``give``

    def taken(self) -> None:
        """Tensors were filled where they are used."""

    # Checkpoints

    def keep(self) -> Kept:
        """See ``Keeper``. Tensors are named as torch's ``get_model_state_dict`` and ``get_optimizer_state_dict`` do."""
        if is_sharded(self._model.module):
            raise TypeError(
                "It is sharded: one island writes it with torch.distributed.checkpoint, by the lines of "
                "docs/howto/checkpoints.md#a-sharded-model. [BG710]"
            )
        session = self._runner.session
        if set(self._runner.everyone.ranks) != set(communicators(session).world.ranks):
            raise TypeError(
                "It was wrapped with a process group of its own: checkpoints hold models of all ranks. [BG710]"
            )
        model, algorithm = self._model, self._model.bagua_algorithm
        held: list[torch.Tensor] = []
        optimizers = [encode_optimizer(optimizer, held) for optimizer in model.bagua_optimizers]
        experts = [encode_experts(optimizer, held) for optimizer in model.bagua_optimizers]
        exchanged = {name for name, _ in shared_state(model.module, model.parameters_to_ignore)}
        # Replicas that differ, as of decentralized algorithms, are each rank's own.
        trained = exchanged.difference(name for name, _ in model.module.named_buffers()) if algorithm.alike else set()
        found = Kept(
            {
                "description": self.describe(),
                "optimizers": optimizers,
                "model": model.tell_newcomers(),
                "algorithm": algorithm.tell_newcomers(),
                "experts": any(getattr(parameter, "expert", False) for parameter in model.module.parameters()),
            },
            {"optimizers": None if algorithm.alike else optimizers, "experts": experts},
        )
        # Out of step replicas differ by the moment alone: rank 0's stand for all.
        mine: Tensors = found.of_rank if algorithm.waits else {}
        everything = [*model.module.named_parameters(), *model.module.named_buffers()]
        for path, name, tensor in [
            *((("model", name), name, tensor) for name, tensor in everything),
            *self._of_optimizers([*optimizers, *experts], held),
        ]:
            if name in trained:
                found.alike[path] = tensor
            else:
                found.of_first[path] = mine[path] = tensor
        for number, bucket in enumerate(model.bagua_buckets):
            for name, (alike, slot) in bucket.lasting_slots.items():
                self._add(found, algorithm, ("slots", f"{number}", name), alike, [slot])
            for at, action in enumerate(bucket.execution.actions):
                self._add(found, algorithm, ("errors of results", f"{number}", f"{at}"), True, action.shared())
                self._add(found, algorithm, ("errors", f"{number}", f"{at}"), False, action.own())
        self._add(found, algorithm, ("algorithm",), True, algorithm.tensors_for_newcomers())
        self._add(found, algorithm, ("algorithm of rank",), False, algorithm.tensors_of_rank())
        return found

    @staticmethod
    def _add(
        found: Kept, algorithm: AlgorithmImpl, path: Path, everywhere: bool, tensors: Iterable[torch.Tensor]
    ) -> None:
        for number, tensor in enumerate(tensors):
            name = (*path, f"{number}")
            if everywhere and algorithm.alike:
                found.alike[name] = tensor
            elif everywhere:
                found.of_first[name] = tensor
            if algorithm.waits and not (everywhere and algorithm.alike):
                found.of_rank[name] = tensor

    def _of_optimizers(
        self, documents: Sequence[Any], held: Sequence[torch.Tensor]
    ) -> list[tuple[Path, str, torch.Tensor]]:
        """(where it lies, name of its parameter, tensor) of what optimizers hold."""
        names: dict[torch.Tensor, str] = {one: name for name, one in self._model.module.named_parameters()}
        optimizers = self._model.bagua_optimizers
        paths: list[tuple[Path, str]] = []
        for number, document in enumerate(documents):
            which = number % len(optimizers)  # documents of experts follow those of all, in the same order
            label = "optimizer" if which == 0 else f"optimizer {which + 1}"
            found = optimizer_paths(optimizers[which], document, names)
            paths += [((label, *path), path[1]) for path in found]
        return [(path, name, tensor) for (path, name), tensor in zip(paths, held, strict=True)]

    def misfit(self, document: Any) -> str:
        theirs = dict(document["description"])
        # Another algorithm may go on from it: settings need not agree.
        if theirs["settings"] != self._model.description["settings"]:
            theirs = {**theirs, "settings": self._model.description["settings"]}
        text = first_difference([theirs, self.describe()])
        # Experts are spread over ranks.
        if not text and document["experts"] and document["model"]["ranks"] != self._runner.everyone.nranks():
            text = f"It has experts of {document['model']['ranks']} ranks: start as many ranks."
        text = text.replace("The ranks' models differ. ", "")
        text = text.replace("The ranks' optimizers differ:", "Of its optimizers")
        text = text.replace("Make the same ones on every rank.", "Make the optimizers that it was written with.")
        return text.replace("rank 0 has", "the checkpoint has").replace("rank 1 has", "this program has")

    def make_room(self, document: Any, own: Any) -> Kept:
        held: list[torch.Tensor] = []
        optimizers = document["optimizers"] if own is None else own["optimizers"] or document["optimizers"]
        for optimizer, told in zip(self._model.bagua_optimizers, optimizers, strict=True):
            decode_optimizer(optimizer, told, held)
        for optimizer, told in zip(self._model.bagua_optimizers, own["experts"] if own else [], strict=False):
            decode_experts(optimizer, told, held)
        same = document["description"]["settings"] == self._model.description["settings"]
        if same:
            self._model.bagua_algorithm.hear_as_newcomer(document["algorithm"])
        self._model.go_back(document["model"] if same else {**document["model"], "begins": [False, False]})
        found = self.keep()
        self._anew = not same
        if not self._anew:
            return found
        everything = {**found.of_rank, **found.of_first, **found.alike}
        # State of another algorithm means nothing to this one.
        return Kept(None, alike={path: one for path, one in everything.items() if path[0].startswith(OF_PROGRAM)})

    def filled(self, ranks: int) -> None:
        self._model.gone_back(ranks, self._anew)
