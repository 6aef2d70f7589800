"""Buckets of gradients: shared memory in which gradients are staged, and reduced in place.

``.grad`` is the program's own memory, as under DDP: it may keep, replace, move or share it. A gradient is copied into
its bucket when it is complete, reduced there, and the result is copied back. ``.grad`` itself is the contribution until
then, so that a step can be repeated from it. A plan that takes gradients from where autograd left them (FRESH) saves
the first copy. Behind the gradients lies a tail of the same dtype: one element per parameter, which says whether this
rank has a gradient for it, and one that asks for the step to be reduced again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from bagua.algorithms.plan import FRESH, GRADIENT, RESULT, Plan
from bagua.torch_api.job.connection import NOWHERE
from bagua.torch_api.step.bucket import Allocate, PlanBucket, Region, region_of, views_like
from bagua.torch_api.step.dataflow import in_place, may_run_twice, tail_path, tail_reaches_all
from bagua.torch_api.step.earlier_results import EarlierResults
from bagua.torch_api.step.parameters import refuse_changed

# Smaller gradients are copied together when their bucket is complete: one call is cheaper than many. A larger one is
# copied as it comes, while it is in the cache and other ranks still compute. On a device all of a bucket are copied
# together: a launch takes the host longer than the copy takes the device.
ALONE_BYTES = 64 << 10


def elements_needed(tensors: Sequence[torch.Tensor]) -> int:
    """Elements of one buffer of a bucket with gradients of these tensors: they, and the tail."""
    return sum(tensor.numel() for tensor in tensors) + len(tensors) + 1


class Entry:
    """One parameter's place in a bucket.

    ``view``: its part of the contributions, of this ``kind``. ``alone``: the gradient is copied there by itself, as it
    comes. ``ready``: this backward filled ``.grad``. ``staged``: ``view`` holds it.
    """

    __slots__ = ("alone", "bucket", "index", "kind", "name", "parameter", "ready", "staged", "view")

    def __init__(
        self, name: str, parameter: torch.Tensor, bucket: GradientBucket, index: int, view: torch.Tensor
    ) -> None:
        self.name = name
        self.parameter = parameter
        self.bucket = bucket
        self.index = index
        self.view = view
        self.kind = view.dtype, view.shape, view.layout, view.device  # all that a copy would convert
        # It is in the cache now; on a device one launch copies all.
        self.alone = parameter.numel() * parameter.element_size() > ALONE_BYTES and not bucket.on_device
        self.ready = self.staged = False

    def stage(self) -> None:
        """Copies the gradient to where contributions lie. Raises NotImplementedError for a sparse one."""
        gradient = self.parameter.grad
        if gradient is None or not self.bucket.copies:
            return
        if (gradient.dtype, gradient.shape, gradient.layout, gradient.device) != self.kind:
            self.refuse(gradient)
        # Under create_graph=True it has a history, which ends here.
        self.view.copy_(gradient.detach() if gradient.requires_grad else gradient)
        if self.bucket.earlier is not None:
            self.bucket.earlier.leave_out(self.parameter, self.view)
        self.staged = True

    def fresh(self) -> torch.Tensor:
        """The gradient of this pass where it lies, in dtype and strides of ``view``. One with others is copied."""
        if self.index in self.bucket.absent:  # a rank without a gradient contributes zeros
            return self.view.zero_()
        assert self.parameter.grad is not None
        gradient = self.parameter.grad.detach()
        if (gradient.dtype, gradient.shape, gradient.layout, gradient.device) != self.kind:
            self.refuse(gradient)
        alike = gradient.dtype == self.view.dtype and gradient.stride() == self.view.stride()
        return gradient if alike else self.view.copy_(gradient)

    def refuse(self, gradient: torch.Tensor) -> None:
        """Raises for a gradient that has another kind than ``view``, unless a copy may convert it: NotImplementedError
        if it is sparse, BaguaError if its parameter is not what it was when the model was wrapped."""
        if gradient.layout is not torch.strided:
            raise sparse_gradient(self.name, gradient)
        refuse_changed(self.name, self.parameter, self.view)


class GradientHook(functools.partial[None]):
    """Our hook at a parameter, of those that torch calls when a gradient is complete."""


def may_change(parameter: torch.Tensor) -> bool:
    """Returns True if a hook that the program registered after ours gets this gradient next."""
    # Hooks run in the order of registration.
    hooks = parameter._post_accumulate_grad_hooks  # private: a habit tells when it moves
    return bool(hooks) and not isinstance(next(reversed(hooks.values())), GradientHook)


def version_of(gradient: torch.Tensor | None) -> int:
    """A number that is another one when the gradient has been changed."""
    return 0 if gradient is None or gradient.is_inference() else gradient._version


def sparse_gradient(name: str, gradient: torch.Tensor) -> NotImplementedError:
    """The error for a gradient that is no dense tensor."""
    return NotImplementedError(
        f"Parameter {name} got a sparse gradient ({gradient.layout}), which nothing foretold: make it by "
        "torch.nn.Embedding(sparse=True), or with sparse=False, or put the name into the module's "
        "_bagua_params_and_buffers_to_ignore. [BG601]"
    )


class GradientBucket(PlanBucket):
    """Gradients that travel together.

    ``pending`` counts entries not ready in this backward. ``second_run``: a gradient came after its bucket
    had gone out, and this rank asks for all plans to run again.
    ``earlier``: results of earlier passes, where the plan adds up.

    ``copies``: the plan wants contributions in one piece. ``may_run_twice``: it may run twice on the same gradients.
    ``shows``: it fills RESULT. ``informed``: every rank sees in the tail whether any rank wants a second run.
    """

    reserved = (FRESH, GRADIENT, RESULT)
    repeats = starts_alone = True

    def __init__(self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate) -> None:
        super().__init__(name, parameters, allocate)
        self.room = len(parameters) + 1
        self._contributions = self._result = self._new_buffer()
        self._result_views = views_like(self._contributions.flat, self.tensors)
        self.entries = [
            Entry(label, parameter, self, index, self._result_views[index])
            for index, (label, parameter) in enumerate(parameters)
        ]
        self.pending = len(self.entries)
        self._all_there = torch.ones_like(self._contributions.tail)  # the tail where no gradient is absent
        self._all_there[-1] = 0  # the last element asks for a second run
        self.absent: list[int] = []
        self.second_run = False
        self.earlier: EarlierResults | None = None
        self.copies = True
        self.may_run_twice = self.shows = self.informed = True
        self._tail_of_all = self._result.tail

    def _new_buffer(self) -> Region:
        return region_of(*self._allocate(self.elements + self.room, self.dtype), self.elements)

    def release(self) -> None:
        super().release()
        nothing = torch.empty(0)
        for entry in self.entries:  # entry and bucket hold each other: this memory would wait for the garbage collector
            entry.view = nothing
        self._result_views = []
        self._contributions = self._result = region_of(nothing, NOWHERE, 0)
        self._tail_of_all = nothing

    def region(self, name: str) -> Region:
        if name == GRADIENT:
            return self._contributions
        return self._result if name == RESULT else super().region(name)

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """See ``PlanBucket.views``; FRESH is valid in ``Local`` steps, before the plan communicates."""
        return [entry.fresh() for entry in self.entries] if name == FRESH else super().views(name)

    def set_plan(self, plan: Plan) -> None:
        """See ``PlanBucket.set_plan``. Runs by itself: when the bucket is full, and at the end of backward."""
        # A result would lie over contributions that are still to be read.
        if not in_place(plan) and self._result is self._contributions:
            self._result = self._new_buffer()
            self._result_views = views_like(self._result.flat, self.tensors)
        super().set_plan(plan)
        read = {name for step in plan.steps for name in step.reads}
        self.copies = FRESH not in read or GRADIENT in read
        # On a device the host does not wait to see whether any rank asks for a second run: there is none.
        self.may_run_twice = may_run_twice(plan) and not self.on_device
        self.shows = any(RESULT in step.writes for step in plan.steps)
        path = tail_path(plan)
        self._tail_of_all = self.region(plan.steps[max(path)].writes[0] if path else RESULT).tail
        self.informed = tail_reaches_all(plan) and not self.on_device

    def start(self) -> None:
        """Makes the contribution whole, and runs the plan.

        Gradients come in that have not been copied yet, among them those that earlier passes accumulated for
        parameters that this one did not reach; zeros for parameters without any gradient (or with a result of earlier
        passes that another rank brings); and the tail.
        """
        self.absent = []
        tail = self._contributions.tail
        # A device is given all in one launch. It is not given numbers of Python's: the host would wait for it.
        views, gradients = [tail], [self._all_there]
        copied: list[Entry] = []
        earlier = self.earlier
        for entry in self.entries:
            gradient = entry.parameter.grad
            if gradient is None or (earlier is not None and earlier.covers(entry.parameter)):
                self.absent.append(entry.index)
                if self.copies:
                    entry.view.zero_()
            elif self.copies and not entry.staged:
                if (gradient.dtype, gradient.shape, gradient.layout, gradient.device) != entry.kind:
                    entry.refuse(gradient)
                views.append(entry.view)
                gradients.append(gradient.detach() if gradient.requires_grad else gradient)
                copied.append(entry)
        torch._foreach_copy_(views, gradients)  # the tail, too: one launch
        if earlier is not None:
            for entry in copied:
                earlier.leave_out(entry.parameter, entry.view)
        for index in self.absent:
            tail[index].zero_()  # ``= 0`` would make the host wait for a device
        if self.second_run:
            tail[-1].fill_(1)
        self.execution.start()

    def unstage(self) -> None:
        """Contributions are to be copied anew: the plan may have written over them."""
        for entry in self.entries:
            entry.staged = False

    def wants_second_run(self) -> bool:
        """Returns True if any rank asked for the step to be reduced again; if this one did, where none can know it of
        the others."""
        return self._tail_of_all[-1].item() > 0 if self.informed else self.second_run

    def show_results(self) -> None:
        """``.grad`` of every parameter that got a gradient on any rank becomes the result, and the pass has ended. A
        plan that fills no result leaves ``.grad`` as it is.

        Waits, on a device, where this rank has no gradient for a parameter: others may have one."""
        self.end_pass()
        if not self.shows:
            return
        missing = frozenset[int]()
        if self.absent:
            presence = self._tail_of_all.tolist()  # waits for a device: only where this rank has no gradient
            missing = frozenset(index for index in self.absent if presence[index] == 0)
        gradients, results = [], []
        for entry, result in zip(self.entries, self._result_views, strict=True):
            if entry.index in missing:
                continue
            if self.earlier is not None:
                self.earlier.note(entry.parameter)
            gradient = entry.parameter.grad
            if gradient is None or gradient.requires_grad or gradient.is_neg():  # no list may have a negated view
                entry.parameter.grad = result.clone()  # a clone: the next pass writes over the bucket
            else:
                gradients.append(gradient)
                results.append(result)
        if gradients:
            torch._foreach_copy_(gradients, results)

    def end_pass(self) -> None:
        """No gradient of the next pass has come."""
        self.pending = len(self.entries)
        for entry in self.entries:
            entry.ready = entry.staged = False


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float) -> None:
    """Multiplies gradients where they lie: one after the other, because torch changes no lists with negated views."""
    for parameter in parameters if factor != 1.0 else ():
        gradient = parameter.grad
        if gradient is not None:  # ``mul_`` of a detached sparse tensor changes nothing
            (gradient._values() if gradient.is_sparse else gradient).detach().mul_(factor)
