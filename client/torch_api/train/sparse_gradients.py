"""Exchanges sparse gradients, those of ``Embedding(sparse=True)``: their mean over all ranks, as it is, after the
buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bagua.algorithms import AlgorithmImpl
from bagua.algorithms.plan import GRADIENT
from bagua.torch_api.comm.sparse import sum_of_sparse
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.step.gradients import scale_gradients
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.training_step import TrainingStep

ABSENT, SPARSE, DENSE = range(3)


def refuse_sparse(
    names: Sequence[str], algorithm: AlgorithmImpl, steps_in_backward: bool, adding: bool = False
) -> None:
    """Raises NotImplementedError if parameters of these names, which have sparse gradients, can't be trained so.
    ``adding``: plans of buckets add gradients up."""
    if not names:
        return
    if steps_in_backward:
        why, remedy = "step_in_backward=True moves those alone whose gradients are dense", "leave step_in_backward out"
    elif algorithm.exchanged == GRADIENT and (adding or not algorithm.takes_sparse):
        why = f"{type(algorithm).__name__.removesuffix('Impl')}, as it is set, takes no means of them"
        remedy = "choose gradient_allreduce with average=True, bytegrad, top_k or power_sgd"
    else:
        return
    raise NotImplementedError(
        f"Parameter {names[0]} gets sparse gradients (sparse=True), and {why}: {remedy}, make the embedding with "
        "sparse=False, or put the name into the module's _bagua_params_and_buffers_to_ignore. [BG601]"
    )


class SparseGradients:
    """Exchanges the sparse gradients of one wrapped model. In an elastic job they are a unit of their own: a rank that
    is lost between the buckets and them has its part in the former alone, on all ranks that are left."""

    def __init__(
        self, parameters: Sequence[tuple[str, torch.nn.Parameter]], runner: Runner, step: TrainingStep | None
    ) -> None:
        """``step``: of the other gradients; None: there are none."""
        self._parameters = [parameter for _, parameter in parameters]
        self._runner = runner
        self._step = step
        self._touched = False  # a gradient came in this pass
        self._weighed = runner.session.weights.changes  # as gradients are that have been accumulated

    def note(self, *_: object) -> None:
        """A gradient has been accumulated: this pass is exchanged, whatever else it reaches."""
        self._touched = True
        if self._step is not None:
            self._step.touch()

    def finish_after(self, finish_others: Callable[[], None]) -> None:
        """Ends the pass: ``finish_others`` exchanges the gradients in buckets. Nothing here if no gradient came."""
        # Asked before the others end: they forget it.
        due = self._touched or (self._step is not None and self._step.touched)
        self._touched = False
        finish_others()
        # A rank alone has its own mean. Without buckets newcomers wait for this unit, which is the step.
        if due and (self._runner.everyone.nranks() > 1 or (self._step is None and self._runner.vote.repeats)):
            self._exchange()

    def clear_gradients(self) -> None:
        """Sets ``.grad`` of all parameters to None."""
        self.abandon()
        for parameter in self._parameters:
            parameter.grad = None

    def abandon(self) -> None:
        """The pass has ended by an exception."""
        self._touched = False

    def weigh(self, changes: float) -> None:
        """Gradients that have been accumulated get the weight of those that follow; see ``TrainingStep.begin_pass``."""
        before, self._weighed = self._weighed, changes
        scale_gradients(self._parameters, changes / before)

    def _exchange(self) -> None:
        # Without buckets it is the training step itself.
        self._runner.vote.together(self._means, show=_show, steps=self._step is None)

    def _means(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Returns each parameter that has a gradient on any rank, and the mean."""
        self.weigh(self._runner.session.weights.changes)
        everyone = self._runner.everyone
        kinds = torch.tensor([_kind(parameter.grad) for parameter in self._parameters], device="cpu")
        everyone.allreduce_inplace(kinds, ReduceOp.MAX)  # DENSE is the largest: one dense gradient makes all dense
        factor = (1.0 if self._step is None else self._step.factor) / everyone.nranks()
        found = []
        for parameter, kind in zip(self._parameters, kinds.tolist(), strict=True):
            if kind == ABSENT:
                continue
            own = parameter.grad.detach() if parameter.grad is not None else _none_of(parameter)
            if kind == DENSE:  # another layer shares the weights
                total = own.to_dense().clone()  # a clone: ``.grad`` stays the contribution until the unit counts
                everyone.allreduce_inplace(total, ReduceOp.SUM)
            else:
                # One sparse dimension on all ranks: rows.
                rows = own if own.sparse_dim() == 1 else own.to_dense().to_sparse(1)
                total = sum_of_sparse(everyone, rows.coalesce())
            (total if kind == DENSE else total.values()).mul_(factor)  # mul_ of a sparse tensor leaves it uncoalesced
            found.append((parameter, total))
        return found


def _show(means: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
    for parameter, mean in means:
        parameter.grad = mean


def _kind(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return ABSENT
    return SPARSE if gradient.layout is torch.sparse_coo else DENSE


def _none_of(parameter: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without entries."""
    return torch.zeros_like(parameter, memory_format=torch.contiguous_format).to_sparse(1)
