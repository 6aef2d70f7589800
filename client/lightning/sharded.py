"""A LightningModule that is divided among the ranks of an island: its mesh, its checkpoints, and its metrics."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.torch_api.comm.shards import is_shard

DIMENSIONS = ("data_parallel", "tensor_parallel")
"""Names of the mesh's dimensions, as in ``ModelParallelStrategy``."""


def make_mesh(device: torch.device, size: int, tensor_parallel: int) -> DeviceMesh:
    """The mesh of an island, of two DIMENSIONS. Raises ConfigError where that is no rectangle."""
    if tensor_parallel < 1 or size % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel_size={tensor_parallel} does not divide an island of {size}: start the job with a "
            "multiple of it as --island-size, or BAGUA_ISLAND_SIZE. [BG618]"
        )
    return init_device_mesh(device.type, (size // tensor_parallel, tensor_parallel), mesh_dim_names=DIMENSIONS)


# Checkpoints hold whole tensors, under the names and numbers of an undivided model.


def whole(value: Any) -> Any:
    """Gathers a DTensor on the CPU of rank 0, which writes checkpoints; None on the others, so that they hold one whole
    tensor at a time. All ranks of an island call it. Returns other objects unchanged."""
    if not is_shard(value):
        return value
    found = value.full_tensor()
    return found.cpu() if bagua.get_rank() == 0 else None


def whole_model_state(module: torch.nn.Module) -> dict[str, Any]:
    """The state of the module with whole tensors on rank 0, and nothing on the others."""
    if bagua.get_island():  # replicas need no gathering: island 0 writes
        return {}
    state = module.state_dict()
    for name, one in state.items():  # in the same dictionary, which knows the modules' versions
        state[name] = whole(one)
    return state if bagua.get_rank() == 0 else {}


def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer with whole tensors on rank 0, and nothing on the others."""
    if bagua.get_island():
        return {}
    state: dict[str, Any] = tree_map(whole, optimizer.state_dict())
    return state if bagua.get_rank() == 0 else {}


def refuse_parts(checkpoint: Mapping[str, Any]) -> None:
    """Raises ConfigError for a checkpoint to which a callback has added what this rank alone has."""
    if any(map(is_shard, tree_leaves(checkpoint))):
        raise ConfigError(
            "A callback, or on_save_checkpoint, has put a part of a divided tensor into the checkpoint, where the "
            "other parts would be missing: put its full_tensor() there, on all ranks. [BG618]"
        )


def divide(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor that all ranks of the island have, where ``like`` is such a part."""
    from torch.distributed.tensor import DTensor, Replicate

    if not is_shard(like) or is_shard(tensor) or tensor.shape != like.shape:
        return tensor
    mesh: DeviceMesh = like.device_mesh  # type: ignore[attr-defined]
    everywhere = DTensor.from_local(tensor.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)
    # ``distribute_tensor`` knows no FSDP over tensor parallelism. A copy: the whole is not to live as long as the part.
    return everywhere.redistribute(placements=like.placements).clone()  # type: ignore[attr-defined]


def divide_model_state(module: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Parts of a state of whole tensors; names that only one of the two has are left to ``load_state_dict``."""
    parts, found = module.state_dict(), copy.copy(state)  # with the modules' versions
    found.update({name: divide(one, parts[name]) for name, one in state.items() if name in parts})
    return found


def divide_optimizer_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of a state of whole tensors, which has the numbers of the optimizer's parameters."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parts = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=False):  # unlike numbers are the optimizer's to refuse
        if (found := parts.get(number)) is not None:
            like = parameter.detach()
            parts[number] = {
                name: divide(one, like) if isinstance(one, torch.Tensor) else one for name, one in found.items()
            }
    return {**state, "state": parts}


# torch.distributed's world is the island, and results count over all ranks.


def is_subgroup(group: Any) -> bool:
    """Returns True for a group that the program has made inside the island."""
    return group is not None and group is not torch.distributed.group.WORLD


def gather_over_all(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, or those of ``group``, each of a shape of its own, of as many dimensions."""
    if is_subgroup(group):
        from torchmetrics.utilities.distributed import gather_all_tensors

        return gather_all_tensors(tensor, group)
    ranks, size = bagua.get_world_size(), tensor.element_size()
    shapes = torch.empty(ranks, tensor.ndim, dtype=torch.int64, device="cpu")
    if tensor.ndim:
        bagua.allgather(torch.tensor(tensor.shape, dtype=torch.int64, device="cpu"), shapes)
    lengths = [size * math.prod(shape) for shape in shapes.tolist()]
    own = torch.zeros(max(size, *lengths), dtype=torch.uint8, device=tensor.device)
    own[: lengths[bagua.get_rank()]] = tensor.detach().contiguous().view(-1).view(torch.uint8)
    everyone = own.new_empty(ranks, len(own))
    bagua.allgather(own, everyone)
    rows = zip(everyone, lengths, shapes.tolist(), strict=True)
    found = [row[:length].view(tensor.dtype).view(shape) for row, length, shape in rows]
    found[bagua.get_rank()] = tensor  # with its graph
    return found


@functools.cache
def gather_metrics_over_all() -> None:
    """Has metrics of torchmetrics, which Lightning logs, gather over all ranks. Once in a process."""
    import torchmetrics.metric

    looked_up: Any = torchmetrics.metric
    looked_up.gather_all_tensors = gather_over_all  # by metrics without a dist_sync_fn; a test tells when it moves
