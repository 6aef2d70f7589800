"""The wrapped model that ``with_bagua`` makes: with tensors, buckets and operations of the original as its guest."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from bagua.algorithms import BucketLayout
from bagua.algorithms.plan import GRADIENT
from bagua.torch_api.compat.backend import Backend, get_backend
from bagua.torch_api.compat.bucket import BaguaBucket
from bagua.torch_api.compat.operations import BucketOperations
from bagua.torch_api.compat.registration import register, registration
from bagua.torch_api.compat.uneven import JoinableModel
from bagua.torch_api.data.torch_samplers import follow
from bagua.torch_api.step.bucket import Allocate, PlanBucket
from bagua.torch_api.step.gradients import GradientBucket
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.step.weight_bucket import WeightBucket
from bagua.torch_api.train.compat_hooks import Guest, Parameters
from bagua.torch_api.train.model import DistributedModel


class OpenGradientBucket(BucketOperations, GradientBucket):
    """A bucket of gradients to which operations can be appended."""


class OpenWeightBucket(BucketOperations, WeightBucket):
    """A bucket of weights to which operations can be appended."""


class RegisteredTensors(Guest):
    """Registered tensors of one model. Every trainable parameter is registered, with its gradient to travel, until the
    algorithm's ``init_tensors`` registers it otherwise."""

    def __init__(self, ddp: DistributedModel, runner: Runner) -> None:
        # The model holds its guest: a cycle would keep both until the garbage collector comes.
        self._ddp = weakref.proxy(ddp)
        self._runner = runner
        self.backend = get_backend(ddp.bagua_module_name)
        self.backend.serve(ddp)

    def begin(self) -> None:
        parameters = self._ddp.bagua_build_params()
        for name, parameter in parameters:
            register(parameter, name, self._ddp.bagua_module_name, _gradient, _set_gradient)
        # Hooks of algorithms written for the original ask it whether a parameter takes part.
        self._ddp.bagua_algorithm._communication_tensor_names = {name for name, _ in parameters}

    def are_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """See ``Guest``: whether nothing but gradients travels."""
        return self._ddp.bagua_algorithm.exchanged != GRADIENT or all(map(_travels_as_gradient, tensors))

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """See ``Guest``: the name that it was registered with."""
        known = registration(tensor)
        return None if known is None else known.name

    def gradient_bucket(self, name: str, parameters: Parameters, allocate: Allocate) -> GradientBucket:
        """See ``Guest``: one to which operations can be appended."""
        return OpenGradientBucket(name, parameters, allocate)

    def weight_bucket(self, name: str, parameters: Parameters, allocate: Allocate) -> WeightBucket:
        """See ``Guest``: one to which operations can be appended."""
        return OpenWeightBucket(name, parameters, allocate)

    def forget(self) -> None:
        self.backend.forget()

    @property
    def idle(self) -> bool:
        return self.backend.idle

    def mark(self, parameter: torch.Tensor) -> bool:
        return self.backend.mark_parameter(parameter)

    def finish(self) -> None:
        self.backend.finish()

    def abandon(self) -> bool:
        return self.backend.abandon()

    def layouts(self, found: Sequence[Any], flatten: bool) -> list[Any]:
        """Sorts the result of ``tensors_to_buckets``: layouts where gradients travel (or weights, if the algorithm
        says so), and buckets of registered tensors where getters choose the tensors that travel."""
        made: list[Any] = []
        for layout in found:
            tensors: Sequence[torch.Tensor] = getattr(layout, "tensors", ())
            if not isinstance(layout, (BaguaBucket, BucketLayout)) or not tensors:
                made.append(layout)
            elif self._ddp.bagua_algorithm.exchanged == GRADIENT and all(map(_travels_as_gradient, tensors)):
                made.append(BucketLayout(layout.name, tuple(tensors)))
            elif isinstance(layout, BaguaBucket) or self.are_gradients(tensors):
                made.append(layout)
            else:
                made.append(BaguaBucket(tensors, layout.name, flatten))
        return made

    def adopt(self, buckets: Sequence[PlanBucket]) -> None:
        group = self._ddp.process_group
        for bucket in buckets:
            if isinstance(bucket, BaguaBucket):
                bucket.attach(self._runner, group)
            elif isinstance(bucket, BucketOperations):
                bucket.process_group = group
                for tensor in bucket.tensors:
                    known = registration(tensor)
                    if known is not None:
                        known.bucket = weakref.ref(bucket)
        self.backend.register_ordered_buckets([bucket for bucket in buckets if isinstance(bucket, BaguaBucket)])


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    parameter.grad = gradient


def _travels_as_gradient(tensor: torch.Tensor) -> bool:
    known = registration(tensor)
    if known is None or known.getter is _gradient:
        return True
    # A getter of the program may return the gradient, too.
    return known.getter is not None and tensor.is_leaf and known.effective_or_none() is tensor.grad


class BaguaDistributedDataParallel(DistributedModel, JoinableModel):
    __doc__ = DistributedModel.__doc__
    _guest: RegisteredTensors

    def _model(self) -> DistributedModel:
        return self

    def _new_guest(self) -> RegisteredTensors:
        follow(self._session)
        return RegisteredTensors(self, self._runner)

    @property
    def _bagua_backend(self) -> Backend:
        """The scheduler of buckets of registered tensors."""
        return self._guest.backend
