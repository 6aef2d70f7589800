"""Buckets of registered tensors, as programs written for the original make them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from bagua.algorithms import Plan
from bagua.algorithms.plan import WEIGHT, Step
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.compat.operations import NOTHING, BucketOperations
from bagua.torch_api.compat.registration import Registration, register, registered
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job.session import current
from bagua.torch_api.step.bucket import Allocate, Region, region_of, views_like
from bagua.torch_api.step.runner import Runner

PADDING = "bagua_padding_tensor"


def _allocator(tensor: torch.Tensor) -> Allocate:
    """Makes memory that can be communicated, where ``tensor`` lies."""
    if not PORT.cuda.holds(tensor):
        return lambda count, dtype: current().memory.place_empty(count, dtype)
    device = tensor.device
    return lambda count, dtype: devices(current()).of(tensor).place_empty(count, dtype, device)


class BaguaBucket(BucketOperations):
    """Tensors that are communicated together: what their getters return travels (slot WEIGHT), and operations act on it
    in place.

    ``flatten``: they lie in memory one after the other, but for gradients. In any case it is memory of the program's
    own: operations that communicate copy them into memory of the daemon, and back. What a getter returns may change
    (``.grad`` does).

    In ``tensors_to_buckets`` of a model whose gradients travel, a bucket says only which of them go together: the
    model makes buckets of gradients of its own.

    Args:
        tensors: Bagua tensors (``ensure_bagua_tensor``) whose effective tensors have one dtype, at least one.
        name: For messages.
        alignment: The bucket is filled up by zeros (``padding_tensor``) to a multiple of so many elements. The engine
            does not need it.

    Raises TypeError for tensors that are no Bagua tensors and for several dtypes, ValueError for no tensors.
    """

    reserved = (WEIGHT,)
    may_change = guarded = True

    def __init__(self, tensors: Sequence[torch.Tensor], name: str, flatten: bool, alignment: int = 1) -> None:
        if not tensors:
            raise ValueError(f"Bucket {name} has no tensors. [BG411]")
        self._registrations = [registered(tensor) for tensor in tensors]
        self._missing = set(self._registrations)
        now = [_effective_or_zeros(registration) for registration in self._registrations]
        if len({tensor.dtype for tensor in now}) > 1:
            raise TypeError(
                f"Bucket {name} has tensors of {sorted({str(tensor.dtype) for tensor in now})}: one dtype. [BG411]"
            )
        names = [registration.name for registration in self._registrations]
        super().__init__(name, list(zip(names, tensors, strict=True)), _allocator(now[0]))
        self.dtype, self.device = now[0].dtype, now[0].device
        # Device meta: shapes and strides without memory.
        self._templates = [tensor.detach().to("meta") for tensor in now]
        self.flatten = flatten
        self.runner: Runner | None = None
        self.backend: object = None  # lives as long as its buckets
        count = sum(tensor.numel() for tensor in now)
        self.elements = -(-count // alignment) * alignment
        self._staged: Region | None = None
        self._parts: list[torch.Tensor] = []
        own = self.elements if flatten else self.elements - count
        flat = torch.zeros(own, dtype=self.dtype, device=self.device)
        self._places = views_like(flat, self._templates) if flatten else []
        if self.elements > count:
            self.padding_tensor = flat[own - (self.elements - count) :]
            register(self.padding_tensor, f"{PADDING}_bucket_{name}")
        self._stale = True  # the execution is not that of the plan
        self.set_plan(NOTHING)
        if flatten:
            self.refresh()
        for registration in self._registrations:  # weak: the tensor's registration must not keep its bucket
            registration.bucket = weakref.ref(self)

    @property
    def pending(self) -> int:
        """Number of its tensors that are not ready in this round."""
        return len(self._missing)

    def mark(self, known: Registration) -> None:
        """Notes that this tensor of it is ready."""
        self._missing.discard(known)

    def mark_none(self) -> None:
        """A round begins in which no tensor is ready."""
        self._missing = set(self._registrations)

    def attach(self, runner: Runner, process_group: BaguaProcessGroup | None = None) -> None:
        """Sets the runner that compiles its plan, and the ranks that operations mean by default."""
        self.runner = runner
        self.process_group = process_group
        self._stale = True

    # The effective tensors

    def templates(self) -> Sequence[torch.Tensor]:
        return self._templates

    def effective_tensors(self) -> list[torch.Tensor | None]:
        return [registration.effective_or_none() for registration in self._registrations]

    def refresh(self) -> None:
        """Moves tensors that have other memory now to their places one after the other."""
        with torch.no_grad():
            for registration, place in zip(self._registrations, self._places, strict=False):
                tensor = registration.effective_or_none()
                if tensor is None or tensor.data_ptr() == place.data_ptr() or registration.is_gradient(tensor):
                    continue  # a gradient may be one that the program keeps
                self._check_shape(registration, tensor, place)
                place.copy_(tensor)
                registration.replace(place)

    def _check_shape(self, registration: Registration, tensor: torch.Tensor, part: torch.Tensor) -> None:
        if tensor.shape != part.shape or tensor.dtype != part.dtype:
            raise BaguaError(
                f"Tensor {registration.name!r} was {part.dtype} {list(part.shape)} when bucket {self.name} was made, "
                f"and is {tensor.dtype} {list(tensor.shape)} now: make the bucket anew. [BG411]"
            )

    def open(self, step: Step) -> None:
        """Copies the tensors for a step that needs them."""
        if WEIGHT in step.reads or WEIGHT in step.writes:
            flat = self.region(WEIGHT).flat
            with torch.no_grad():
                for registration, part in zip(self._registrations, self._parts, strict=True):
                    tensor = registration.effective_or_none()
                    if tensor is None:
                        part.zero_()
                    else:
                        self._check_shape(registration, tensor, part)
                        part.copy_(tensor)
                if self.padding_tensor is not None:
                    flat[self.elements - self.padding_tensor.numel() :] = self.padding_tensor

    def shut(self, step: Step, changed: bool) -> None:
        """Tensors get the values that the step has made."""
        if changed and WEIGHT in step.writes:
            with torch.no_grad():
                for registration, part in zip(self._registrations, self._parts, strict=True):
                    tensor = registration.effective_or_none()
                    if tensor is None:
                        registration.replace(part.clone())  # a clone: the next step writes over this part
                    else:
                        tensor.copy_(part)

    # The bucket

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """See ``PlanBucket.views``; those of WEIGHT are the effective tensors."""
        if name == WEIGHT:
            return [one for one in self.effective_tensors() if one is not None]
        return views_like(self.slot(name), self._templates)

    def region(self, name: str) -> Region:
        if name != WEIGHT:
            return super().region(name)
        if self._staged is None:
            self._staged = region_of(*self._allocate(self.elements, self.dtype), self.elements)
            self._parts = views_like(self._staged.flat, self._templates)
        return self._staged

    def set_plan(self, plan: Plan) -> None:
        """See ``PlanBucket.set_plan``. Raises BaguaError while the operations run."""
        if self.execution.started:
            raise BaguaError(
                f"Bucket {self.name} is at work: wait_pending_comm_ops() before changing its operations. [BG411]"
            )
        super().set_plan(plan)
        self._stale = True

    def start(self) -> None:
        if self._stale:
            if self.runner is None:
                raise BaguaError(
                    f"Bucket {self.name} belongs to no model: get_backend(name).register_ordered_buckets([bucket]). "
                    "[BG411]"
                )
            self.runner.adopt(self)
            self._stale = False
        super().start()

    def release(self) -> None:
        """See ``PlanBucket.release``. Waits for operations that have begun."""
        with suppress(CommunicationError):
            self.execution.abandon()
        super().release()
        self.runner = self.backend = None
        self._parts, self._staged = [], None


def _effective_or_zeros(registration: Registration) -> torch.Tensor:
    found = registration.effective_or_none()
    return torch.zeros_like(registration.owner.detach()) if found is None else found
