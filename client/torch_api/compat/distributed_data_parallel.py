"""``DistributedDataParallel`` in the signature of torch's, as the original has it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from bagua.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.comm.groups import BaguaProcessGroup, _get_default_group, from_torch_group
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.compat.uneven import JoinableModel, join
from bagua.torch_api.step.bucket import PlanBucket

# torch's default. With it, the sizes are those of with_bagua.
DEFAULT_BUCKET_MB = 25


def to_bagua_process_group(process_group: Any = None) -> BaguaProcessGroup:
    """The group of the same ranks: for None all ranks, for a ``torch.distributed`` group its own, for one of ours
    itself. Raises ValueError for anything else, and where this process is no member."""
    if process_group is None:
        return _get_default_group()
    if isinstance(process_group, BaguaProcessGroup):
        return process_group
    return from_torch_group(process_group)


class DistributedDataParallel(torch.nn.Module, JoinableModel):
    """A module around ``module`` whose training is distributed.

    Args:
        module: With at least one trainable parameter. Parameters and buffers become rank 0's.
        device_ids, output_device: None, or the GPU on which the module lies. They choose nothing: inputs must be there.
        dim: 0. Batches are not split: each rank loads its own.
        broadcast_buffers: Buffers (statistics of BatchNorm) become rank 0's before each forward pass in training, but
            inside ``no_sync``. False: they go their own way on each rank after the start.
        process_group: The ranks that train it, as a group of ours or of torch.distributed. None: all.
        bucket_cap_mb: Mebibytes per bucket of gradients. 25, the default: as ``with_bagua`` does it.
        find_unused_parameters: Accepted: parameters without a gradient are always handled.
        static_graph: Accepted: a graph that stays the same needs no word.
        check_reduction: Accepted: that all ranks exchange the same is always checked.
        gradient_as_bucket_view: Accepted for programs that pass it: ``.grad`` is always memory of the program's own.
        optimizers: Those that train it; state and hyper-parameters become rank 0's. Only algorithms that act after an
            optimizer's step need them.
        algorithm: None: that of environment variable BAGUA_ALGORITHM, else gradient all-reduce.

    Raises ValueError for arguments that can't be honoured, BaguaError, on every rank, if the ranks' models differ.

    ``inner``: the ``BaguaDistributedDataParallel`` that does it; None in a copy, which is an ordinary module.
    """

    __module__ = "bagua.torch_api.data_parallel.distributed"  # the public path, in pickles and messages
    inner: BaguaDistributedDataParallel | None = None

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = DEFAULT_BUCKET_MB,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        algorithm: Algorithm | None = None,
        *,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        JoinableModel.__init__(self)
        _check_module(module, device_ids, output_device)
        if dim != 0:
            raise ValueError(
                f"dim is {dim}: batches are not split here, so that it has no meaning. Leave it out. [BG607]"
            )
        broadcast_buffers = True if broadcast_buffers is None else broadcast_buffers  # torch's defaults
        bucket_cap_mb = DEFAULT_BUCKET_MB if bucket_cap_mb is None else bucket_cap_mb
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}: it must be positive. [BG607]")
        group = to_bagua_process_group(process_group)
        self.module = module
        self.dim = dim
        self.broadcast_buffers = broadcast_buffers
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = self.is_multi_device_module = False
        self.device = next(module.parameters()).device
        self.device_type = self.device.type
        previous = module.__dict__.get("bagua_ddp")
        if previous is not None and previous.module is module:  # a module that was wrapped before would exchange twice
            previous.close()
        self.inner = BaguaDistributedDataParallel(
            module,
            optimizers,
            algorithm,
            group,
            gradient_as_bucket_view=gradient_as_bucket_view,
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            bucket_bytes=None if bucket_cap_mb == DEFAULT_BUCKET_MB else max(1, round(bucket_cap_mb * (1 << 20))),
        )
        module.__dict__["bagua_ddp"] = self.inner  # the next wrapping of the module ends this one

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls ``module``."""
        return self.module(*inputs, **kwargs)

    def _bagua_wrapper(self) -> BaguaDistributedDataParallel | None:
        return self.inner

    def _model(self) -> BaguaDistributedDataParallel:
        if self.inner is None:
            raise AttributeError(
                "A copy of a distributed module is an ordinary one: wrap copy.module with DistributedDataParallel(). "
                "[BG607]"
            )
        return self.inner

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in this block only accumulate on this rank; the next one outside exchanges the whole."""
        return nullcontext() if self.inner is None else self.inner.no_sync()

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[object]:
        """A block in which ranks may have different numbers of batches, as torch's: see ``bagua.join``."""
        return join(
            self._model(),
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if a backward pass now would exchange anything. May be set, as that of torch's class."""
        return self._model().require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, wanted: bool) -> None:
        self._model().require_backward_grad_sync = wanted

    @property
    def parameters_to_ignore(self) -> frozenset[str]:
        """Names of parameters and buffers that stay this rank's own."""
        return self._model().parameters_to_ignore

    @property
    def bagua_algorithm(self) -> AlgorithmImpl:
        return self._model().bagua_algorithm

    @property
    def bagua_optimizers(self) -> list[torch.optim.Optimizer]:
        return self._model().bagua_optimizers

    @property
    def bagua_buckets(self) -> list[PlanBucket]:
        """The buckets in which gradients, or weights, travel."""
        return self._model().bagua_buckets

    # Methods of torch's class that this one refuses

    def scatter(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("scatter: each rank loads its own batch; use torch's DistributedSampler. [BG412]")

    def to_kwargs(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("to_kwargs: batches are not moved to another device; do so before the call. [BG412]")

    def gather(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("gather: outputs stay on their rank; use bagua.allgather(output, everyone). [BG412]")

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            "register_comm_hook: how gradients travel is the algorithm's choice; pass algorithm=, for example "
            "GradientAllReduceAlgorithm(codec='fp16'), or write one (bagua.algorithms). [BG412]"
        )

    def will_sync_module_buffers(self) -> NoReturn:
        raise NotImplementedError("will_sync_module_buffers: read inner.broadcast_buffers. [BG412]")


def check_devices(device_ids: Sequence[Any] | None, output_device: Any, device: torch.device) -> None:
    """Raises ValueError if these arguments, as torch's take them, name anything else than ``device``, a GPU."""
    named = [*(device_ids or ()), *(() if output_device is None else (output_device,))]
    if named and device.type == "cpu":
        raise ValueError(
            f"device_ids is {device_ids} and output_device {output_device}, but the module is on the CPU: these are "
            "for modules on a GPU. Pass None. [BG607]"
        )
    for one in named:
        found = torch.device(device.type, one) if isinstance(one, int) else torch.device(one)
        if found != device:
            raise ValueError(
                f"device_ids is {device_ids} and output_device {output_device}, but the module is on {device}: a rank "
                "trains on the device where its module lies. Move the module, or pass None. [BG607]"
            )


def _check_module(module: torch.nn.Module, device_ids: Sequence[Any] | None, output_device: Any) -> None:
    """Raises ValueError for a module that can't be wrapped, or that lies elsewhere than the arguments say."""
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError(f"{type(module).__name__} has no trainable parameter: there is nothing to distribute. [BG607]")
    devices = sorted({parameter.device.type for parameter in parameters})
    if len(devices) > 1:
        raise ValueError(f"The module's parameters are on devices of several types: {', '.join(devices)}. [BG607]")
    check_devices(device_ids, output_device, parameters[0].device)


DistributedDataParallel_V1_9_0 = DistributedDataParallel
"""The original's name of the class; there ``DistributedDataParallel`` is a function that makes one."""
