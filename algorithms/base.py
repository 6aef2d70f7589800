"""The interface of algorithms: ``Algorithm`` is a description, ``AlgorithmImpl`` is it at work on one wrapped model.

An ``Algorithm`` may be used for several models: each wrapping calls ``reify``. The wrapped model asks the
implementation, in this order: which tensors are exchanged (``init_tensors``), how they are grouped
(``tensors_to_buckets``), what happens to a full bucket (``init_operations``: a plan), and what to do at four moments
of a training step (``init_*_hook``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from bagua.algorithms.plan import Plan
from bagua.algorithms.registry import GlobalAlgorithmRegistry


class ReduceBucket(Protocol):
    """A bucket in shared memory, as algorithms see it."""

    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients lie in the bucket, in order."""
        ...

    def set_plan(self, plan: Plan) -> None:
        """What the engine does with the bucket once every local rank has filled it."""
        ...


class DataParallel(Protocol):
    """A wrapped model, as algorithms see it."""

    def bagua_build_params(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Trainable parameters in the order of their registration, each once."""
        ...

    def mark_ready(self, name: str, parameter: torch.nn.Parameter) -> None:
        """The gradient of this parameter is complete on this rank."""
        ...

    def finish_backward(self) -> None:
        """Submits what is left, waits for all buckets and shows the results in ``.grad``."""
        ...


@dataclass(frozen=True)
class BucketLayout:
    """Which tensors share a bucket, in the order in which they lie there. All have one dtype."""

    name: str
    tensors: tuple[torch.Tensor, ...]


def _nothing(*_: Any) -> None:
    """The hook of an algorithm that has nothing to do at that moment."""


class AlgorithmImpl:
    """One algorithm at work on one wrapped model. The methods here exchange gradients; a subclass overrides what
    differs.

    Every rank runs the same methods at the same moments; what they return must agree between ranks.

    ``follows_arrival``: buckets are made once more, in the order in which the gradients of the first synchronised pass
    came, as rank 0 saw it. An algorithm that exchanges something else, or whose own order matters, sets it to False.
    """

    follows_arrival = True

    def __init__(self, process_group: object) -> None:
        self.process_group = process_group

    def need_reset(self) -> bool:
        """Asked before every forward pass in training. True: tensors, buckets and plans are made again, and with them
        what error feedback has kept: it begins anew."""
        return False

    def init_tensors(self, ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Parameters whose gradients are exchanged, in the order in which buckets are filled and sent at first.

        Backward reaches the last layers first, so the order is that of registration reversed. See ``follows_arrival``.
        """
        return [parameter for _, parameter in reversed(ddp.bagua_build_params())]

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BucketLayout]:
        """Buckets for the suggested grouping. ``do_flatten`` is False where ``.grad`` must keep memory of its own."""
        return [BucketLayout(str(index), tuple(group)) for index, group in enumerate(tensors)]

    def init_operations(self, ddp: DataParallel, bucket: ReduceBucket) -> None:
        """Gives the bucket its plan. Called for every bucket at wrap, after each reset, and when buckets are
        made again in the order of arrival."""
        raise NotImplementedError(f"{type(self).__name__} must override init_operations and give each bucket a plan.")

    def init_forward_pre_hook(self, ddp: DataParallel) -> Callable[[Any], None]:
        """The returned function gets the input of every forward pass in training, before it."""
        return _nothing

    def init_backward_hook(self, ddp: DataParallel) -> Callable[[str, torch.nn.Parameter], None]:
        """The returned function gets the name and the parameter whenever a gradient has been accumulated."""
        return ddp.mark_ready

    def init_post_backward_hook(self, ddp: DataParallel) -> Callable[[], None]:
        """The returned function is called once at the end of every backward pass that synchronises."""
        return ddp.finish_backward

    def init_post_optimizer_step_hook(self, ddp: DataParallel) -> Callable[[torch.optim.Optimizer], None]:
        """The returned function gets the optimizer after each of its steps."""
        return _nothing


class Algorithm:
    """Description of an algorithm, given to ``with_bagua``."""

    def reify(self, process_group: object) -> AlgorithmImpl:
        """A new implementation for one model on ``process_group``."""
        raise NotImplementedError(f"{type(self).__name__} must override reify and return its AlgorithmImpl.")

    @classmethod
    def init(cls, name: str, **kwargs: Any) -> Algorithm:
        """The algorithm registered as ``name``, made with these arguments. Raises KeyError for an unknown name."""
        made: Algorithm = GlobalAlgorithmRegistry.get(name)(**kwargs)
        return made
