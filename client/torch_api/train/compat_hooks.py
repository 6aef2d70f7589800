"""Guests of the training step: an interface beside the algorithms' own, with tensors and buckets of its own.

``bagua.torch_api.compat`` is one, for algorithms written for the original. The training step works without any.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.torch_api.step.bucket import Allocate, PlanBucket
from bagua.torch_api.step.gradients import GradientBucket
from bagua.torch_api.step.weight_bucket import WeightBucket

Parameters = Sequence[tuple[str, torch.Tensor]]


class Guest:
    """A guest of one model that does nothing. A subclass overrides the methods in which it has a part."""

    # When buckets are made

    def begin(self) -> None:
        """Called before the algorithm names its tensors."""

    def are_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Returns True if these parameters stand for their gradients, and not for tensors of the guest's."""
        return True

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that is no parameter of the model; None if it has none."""
        return None

    def layouts(self, found: Sequence[Any], flatten: bool) -> Sequence[Any]:
        """The algorithm's layouts. A ``PlanBucket`` among them, made by the guest, is taken as it is."""
        return found

    def gradient_bucket(self, name: str, parameters: Parameters, allocate: Allocate) -> GradientBucket:
        return GradientBucket(name, parameters, allocate)

    def weight_bucket(self, name: str, parameters: Parameters, allocate: Allocate) -> WeightBucket:
        return WeightBucket(name, parameters, allocate)

    def adopt(self, buckets: Sequence[PlanBucket]) -> None:
        """Called when these buckets have been made, before they get their plans."""

    def forget(self) -> None:
        """Called when they are given back."""

    # In a training step

    @property
    def idle(self) -> bool:
        """True if it has no bucket of its own."""
        return True

    def mark(self, parameter: torch.Tensor) -> bool:
        """The gradient of this parameter has been accumulated. True if it lies in a bucket of the guest's."""
        return False

    def finish(self) -> None:
        """The pass ends: waits for the guest's buckets."""

    def abandon(self) -> bool:
        """The pass has ended by an exception. True if some of the guest's buckets were at work."""
        return False
