"""Parameters of which this rank holds a part, as FSDP2 and tensor parallelism make them (DTensors), as plain tensors.

Buckets, plans and codecs work on the parts: ranks at the same position of their islands hold the same one. What an
island does inside, to give each of its ranks its part of the gradient, is torch's.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed

from bagua.base.errors import ConfigError


def is_shard(tensor: torch.Tensor) -> bool:
    """Returns True if ranks hold parts of this tensor."""
    # Nobody has such a tensor who has not imported the module, which takes a tenth of a second.
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def is_sharded(module: torch.nn.Module) -> bool:
    """Returns True if ranks hold parts of some of the model's parameters."""
    return any(map(is_shard, module.parameters()))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the memory of it; the tensor itself where ranks hold no parts."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():
        found: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return found


def with_part(part: torch.Tensor, whole: Any) -> Any:
    """A tensor that is divided as ``whole`` is, of which this rank holds ``part``."""
    module = sys.modules["torch.distributed.tensor"]
    return module.DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def divisions(tensor: Any) -> list[int | None]:
    """For each dimension of the mesh the dimension of the tensor that is divided along it; None: none is."""
    return [getattr(one, "dim", None) for one in tensor.placements]


def empty_shard(like: Any, shape: Sequence[int], dtype: torch.dtype, divided: Sequence[int | None]) -> torch.Tensor:
    """A tensor over the mesh of ``like``, divided as ``divisions`` has told of another one. Its elements are to be
    filled."""
    module = sys.modules["torch.distributed.tensor"]
    placements = [module.Replicate() if one is None else module.Shard(one) for one in divided]
    made: torch.Tensor = module.empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)
    return made


class Shard(torch.nn.Parameter):
    """This rank's part of a parameter, ``whole``. Its ``.grad`` is the part of the parameter's."""

    whole: Any

    def __new__(cls, whole: torch.Tensor) -> Shard:
        made = torch.Tensor._make_subclass(cls, local_part(whole), whole.requires_grad)
        made.whole = whole
        return made

    @property
    def grad(self) -> torch.Tensor | None:
        found = self.whole.grad
        return None if found is None else local_part(found)

    @grad.setter
    def grad(self, part: torch.Tensor | None) -> None:
        self.whole.grad = None if part is None else with_part(part, self.whole)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        # FSDP may give its parameter other memory before the first forward pass, where parts are not equally long.
        return local_part(self.whole)


def whole_of(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter that autograd and optimizers know."""
    return parameter.whole if isinstance(parameter, Shard) else parameter


@torch.no_grad()
def divide_gradient(parameter: Any) -> None:
    """Divides a gradient among the ranks of an island as its parameter is: tensor parallelism leaves sums to be made
    (``Partial``). A hook of autograd: all ranks of an island come to it in the same order."""
    gradient = parameter.grad
    if gradient is not None and gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


class IslandMeans:
    """Averages gradients over those ranks of an island that hold the same part of a parameter, where torch does not: of
    whole parameters, as DDP does it with those that FSDP ignores, and of those that are divided among fewer ranks than
    the island has. At the end of a pass each group of such ranks makes one all-reduce for each dtype. A parameter that
    no rank of a group has a gradient for keeps none."""

    def __init__(self, parameters: Sequence[tuple[str, torch.Tensor]]) -> None:
        """All ranks of the island call it together. Raises ConfigError for meshes that don't divide an island."""
        self._parameters: list[tuple[str, torch.Tensor]] = []
        self._together: dict[tuple[Any, torch.dtype], list[torch.Tensor]] = {}
        for name, parameter in parameters:
            if (group := same_part(name, parameter)) is not None:
                self._parameters.append((name, parameter))
                self._together.setdefault((group, parameter.dtype), []).append(parameter)

    def finish(self, due: bool, weight: float, mark: Callable[[str, Any], None], finish: Callable[[], None]) -> None:
        """Ends a pass: averages if that is ``due``, marks these gradients as ready, and finishes the pass of all.
        ``weight``: of gradients of this rank, by which each is multiplied already."""
        if due:
            for (group, _), parameters in self._together.items():
                _average(group, parameters, weight)
            for name, parameter in self._parameters:
                if parameter.grad is not None:
                    mark(name, parameter)
        finish()

    @property
    def names(self) -> frozenset[str]:
        """Names of the parameters whose gradients it averages."""
        return frozenset(name for name, _ in self._parameters)


@torch.no_grad()
def _average(group: Any, parameters: Sequence[torch.Tensor], weight: float) -> None:
    """Averages the gradients of these parameters over the group; a rank without one counts as one with zeros."""
    found = [one.grad for one in parameters]
    parts = [torch.zeros_like(one.data) if grad is None else grad for one, grad in zip(parameters, found, strict=True)]
    presence = parts[0].new_tensor([grad is not None for grad in found])
    flat = torch.cat([*(part.flatten() for part in parts), presence])
    # While a member is lost some ranks of an island have the next generation's weight: each brings its own to its mean.
    if weight != 1.0:
        flat[: -len(parts)] /= weight
    distributed.all_reduce(flat, group=group)
    if weight != 1.0:
        flat[: -len(parts)] *= weight
    *means, presence = torch.split(flat, [*(part.numel() for part in parts), len(parts)])
    ranks = distributed.get_world_size(group)
    for parameter, mean, part, there in zip(parameters, means, parts, presence.tolist(), strict=True):
        if there:
            parameter.grad = part.copy_(mean.div_(ranks).view_as(part))


def ranks_of(parameter: torch.Tensor) -> tuple[int, ...]:
    """Ranks of torch.distributed's world among which a parameter is divided, in their order; () for a whole one."""
    whole: Any = whole_of(parameter)
    return tuple(sorted(whole.device_mesh.mesh.flatten().tolist())) if is_shard(whole) else ()


def even_share(parameter: torch.Tensor) -> int:
    """Elements of a parameter on each rank if all had as many: the same number on all ranks of an island."""
    whole: Any = whole_of(parameter)
    elements: int = whole.numel()
    if is_shard(whole):
        for at, cut in enumerate(divisions(whole)):
            elements = elements if cut is None else -(-elements // whole.device_mesh.size(at))
    return elements


def division_words(parameter: torch.Tensor) -> str:
    """Says among how many ranks a parameter is divided, and copied: `` of 2``, `` of 4 x 2``; empty for a whole one."""
    whole: Any = whole_of(parameter)
    if not is_shard(whole):
        return ""
    copies: int = math.prod(whole.device_mesh.size(at) for at, cut in enumerate(divisions(whole)) if cut is None)
    ranks: int = whole.device_mesh.size()
    return f" of {ranks // copies}" + f" x {copies}" * (copies > 1)


def refuse_foreign_meshes(module: torch.nn.Module, island_size: int) -> None:
    """Raises ConfigError if the program has begun torch.distributed by itself, so that meshes may leave the island."""
    world = distributed.get_world_size()
    if world != island_size:
        name, parameter = next((name, one) for name, one in module.named_parameters() if is_shard(one))
        raise ConfigError(
            f"Parameter {name} is divided among ranks {list(ranks_of(parameter))} of {world} that torch.distributed "
            f"has, and an island has {island_size}: leave torch.distributed to bagua.init_process_group(), which makes "
            "it the island's, and shard over a mesh of it. [BG618]"
        )


_SAME_PART: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Groups of torch.distributed, by its world, and by the ranks among which parameters are divided."""


def same_part(name: str, parameter: torch.Tensor) -> Any:
    """The group of the ranks of this island that hold the same part of the parameter as this one; None: there is no
    other. Made once; all ranks of the island call it together. Raises ConfigError for a mesh that does not divide the
    island."""
    island, ranks = tuple(range(distributed.get_world_size())), ranks_of(parameter)
    if ranks in ((), island):
        return None if ranks else distributed.group.WORLD
    known = _SAME_PART.setdefault(distributed.group.WORLD, {})
    if ranks not in known:
        told = [torch.empty(len(ranks), dtype=torch.int64) for _ in island]
        distributed.all_gather(told, torch.tensor(ranks))
        meshes = sorted({tuple(one.tolist()) for one in told})
        if sorted(rank for mesh in meshes for rank in mesh) != list(island):
            raise ConfigError(
                f"Parameter {name} is divided among ranks {', '.join(map(str, meshes))} of the island: each of its "
                f"{len(island)} ranks must be in one such mesh. [BG618]"
            )
        for together in zip(*meshes, strict=True):
            group = distributed.new_group(list(together))
            if distributed.get_rank() in together:
                known[ranks] = group
    return known[ranks]


def fsdp_units(module: torch.nn.Module) -> list[Any]:
    """Modules of a model that ``fully_shard`` was called for."""
    found = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(found, "FSDPModule", ())  # since torch 2.6
    return [one for one in module.modules() if isinstance(one, kind)]


class AfterGather:
    """Calls ``hook(unit)`` when a unit of FSDP has put whole parameters in the places of parts, for a forward pass or
    for a method of ``register_fsdp_forward_method``, until it is removed."""

    def __init__(self, unit: Any, hook: Callable[[torch.nn.Module], None]) -> None:
        self._handle = unit.register_forward_pre_hook(lambda module, _: hook(module))
        # Methods run no hooks of modules. They look this one up, private to torch, which a test watches.
        self._state = state = unit._get_fsdp_state()
        own = state._pre_forward

        def gather(module: torch.nn.Module, *inputs: Any) -> Any:
            found = own(module, *inputs)
            hook(module)
            return found

        state._pre_forward = gather

    def remove(self) -> None:
        self._handle.remove()
        vars(self._state).pop("_pre_forward", None)  # units that are sharded as one share their state


def show_parts(module: torch.nn.Module) -> None:
    """Brings the parameters of FSDP's units back to parts. After a forward pass without a backward pass, and inside of
    one, whole ones stand in their places."""
    for unit in fsdp_units(module):
        unit.reshard()


def spread_parts(module: torch.nn.Module) -> None:
    """Gives ranks of an island that hold the same part of a parameter the same values. All call it together, and
    outside of units, which some might repeat: groups are made here."""
    for name, one in module.named_parameters():
        if not is_shard(one):
            continue
        whole: Any = one
        copies = [whole.device_mesh.get_group(at) for at, cut in enumerate(divisions(whole)) if cut is None]
        for group in (same_part(name, one), *copies):
            if group is not None:
                distributed.broadcast(local_part(one), distributed.get_global_rank(group, 0), group)
