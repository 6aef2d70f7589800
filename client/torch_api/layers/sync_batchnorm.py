"""BatchNorm over the batches of all ranks: one small all-reduce forward, and one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, Communicator
from bagua.torch_api.comm.groups import communicator_of_group
from bagua.torch_api.job import environment
from bagua.torch_api.job.session import is_initialized

STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance are those of all ranks' batches together. [batch, channels, ...], of any number
    of dimensions; float32, float64, and float16 or bfloat16 (statistics are float32 then).

    Output, gradient of the input and running statistics are those of one process on the whole batch. Gradients of
    weight and bias are those of this rank's part, as of any other parameter: the wrapped model adds or averages them.
    Batches may differ in size between ranks, and be empty on some.

    In training all ranks of the group call it, forward and backward, as often as each other. In evaluation it
    communicates nothing. Without ``init_process_group`` a single process gets an ordinary BatchNorm. In an elastic job
    both exchanges are repeated when a rank is lost.

    ``process_group``: the ranks among which it normalises; None: all. A group of ``torch.distributed`` or of
    ``bagua.torch_api``. The other arguments are those of ``torch.nn.BatchNorm2d``. Raises ValueError for an input
    without channels, and, in training, if all ranks together have one value for each channel.

    Ioffe and Szegedy, Batch Normalization, 2015; partial variances are put together as in Chan, Golub and LeVeque,
    1979.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"The input has shape {list(input.shape)}: it must be [batch, {self.num_features}, ...], with the "
                "channels second. [BG611]"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        comm = self._communicator() if self.training else NON_COMM_MEMBER
        if comm is NON_COMM_MEMBER or comm.nranks() == 1:
            return super().forward(input)
        mean, variance, count = _statistics(input, comm)
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1))  # running variances are without bias, as torch's
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        normalised: torch.Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, variance, count, self.eps, comm
        )
        return normalised

    def _communicator(self) -> Communicator:
        if not is_initialized() and environment.get_world_size() == 1:
            return NON_COMM_MEMBER
        return communicator_of_group(self.process_group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """``module`` with every BatchNorm in it, also torch's SyncBatchNorm, replaced by this class. Parameters and
        buffers stay the same objects. Returns the replacement if ``module`` itself is one. Call it before the
        optimizer's construction and before ``with_bagua``. Raises TypeError for one that has no shape yet."""
        made: dict[nn.Module, nn.Module] = {}  # one that is used at several places stays one
        for path, one in list(module.named_modules(remove_duplicate=False)):
            if one not in made:
                made[one] = _replaced(cls, one, process_group)
            parent, _, name = path.rpartition(".")
            if made[one] is not one and path:
                setattr(module.get_submodule(parent), name, made[one])
        return made[module]


convert_sync_batchnorm = SyncBatchNorm.convert_sync_batchnorm


def _replaced(kind: type[SyncBatchNorm], module: nn.Module, process_group: Any) -> nn.Module:
    if not isinstance(module, _BatchNorm) or isinstance(module, SyncBatchNorm):
        return module
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        raise TypeError(
            f"A {type(module).__name__} has no shape yet: run one forward pass before the conversion. [BG611]"
        )
    made = kind(
        module.num_features,
        module.eps,
        module.momentum,
        module.affine,
        module.track_running_stats,
        process_group,
        device="meta",  # everything is taken over below
    )
    for name in STATE:
        setattr(made, name, getattr(module, name))
    made.training = module.training
    return made


def _statistics(input: torch.Tensor, comm: Communicator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean and biased variance [channels] of all ranks' inputs, and the number of values of a channel [1], float64."""
    channels, dimensions = input.shape[1], _all_but_channels(input)
    with torch.no_grad():
        message = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
        mine = input.numel() // channels
        if mine:
            variance, mean = torch.var_mean(input.to(_wide(input)), dimensions, correction=0)
            mean, variance = mean.double(), variance.double()
            # Squares of this size would cancel in float32. Here what is lost is 1e-16 of the squared mean.
            torch.cat([mean, variance + mean * mean, mean.new_ones(1)], out=message).mul_(mine)
        comm.allreduce_inplace(message)
        mean, square, count = message[:channels], message[channels:-1], message[-1:]
        # ``count.item()`` waits for a device: only where this rank has too few itself.
        if mine < 2 and count.item() < 2:
            raise ValueError(
                "All ranks together have fewer than 2 values for each channel, and BatchNorm needs more in training: "
                f"this rank's input has shape {list(input.shape)}. [BG611]"
            )
        mean = mean / count
        variance = (square / count - mean * mean).clamp_(min=0)  # rounding may leave a negative one
    return mean, variance, count


def _all_but_channels(input: torch.Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _wide(input: torch.Tensor) -> torch.dtype:
    """The dtype in which it is computed."""
    return torch.promote_types(input.dtype, torch.float32)


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
        comm: Communicator,
    ) -> torch.Tensor:
        wide = _wide(input)
        context.comm = comm
        context.save_for_backward(input, weight, mean.to(wide), (variance + eps).rsqrt().to(wide), count)
        scale, shift = (None if one is None else one.to(wide) for one in (weight, bias))
        return F.batch_norm(input, mean.to(wide), variance.to(wide), scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse, count = context.saved_tensors
        dimensions, shape = _all_but_channels(input), (1, -1, *(1,) * (input.dim() - 2))
        gradient = gradient.to(mean.dtype)
        normal = (input.to(mean.dtype) - mean.view(shape)).mul_(inverse.view(shape))
        totals = torch.stack([gradient.sum(dimensions), (gradient * normal).sum(dimensions)])
        of_bias, of_weight = (None, None) if weight is None else totals.to(weight.dtype).unbind()
        if not context.needs_input_grad[0]:  # a first layer: no exchange for a gradient that nobody reads
            return None, of_weight, of_bias, None, None, None, None, None
        everywhere = totals.to(torch.float64, copy=True)  # a copy: ``totals`` are the gradients of weight and bias
        context.comm.allreduce_inplace(everywhere)
        along, across = (everywhere / count).to(mean.dtype).unbind()
        scale = inverse if weight is None else inverse * weight.to(mean.dtype)
        result = normal.mul_(across.view(shape)).add_(along.view(shape)).neg_().add_(gradient).mul_(scale.view(shape))
        return result.to(input.dtype), of_weight, of_bias, None, None, None, None, None
