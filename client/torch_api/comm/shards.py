"""Parameters of which this rank holds a part, as FSDP2 and tensor parallelism make them (DTensors), as plain tensors.

Buckets, plans and codecs work on the parts: ranks at the same position of their islands hold the same one. What an
island does inside, to give each of its ranks its part of the gradient, is torch's.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import distributed

from bagua.base.errors import BaguaError


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
        if found is None:
            return None
        if found.placements != self.whole.placements:
            raise BaguaError(
                f"A parameter {list(self.whole.shape)} is divided as {self.whole.placements} among the ranks of the "
                f"island, and its gradient as {found.placements}: shard the model by fully_shard alone, which was "
                "tried between islands. [BG618]"
            )
        return local_part(found)

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
def average_in_island(parameter: torch.Tensor) -> None:
    """Averages the gradient of a parameter that each rank of an island holds whole, as DDP does it with those that FSDP
    ignores. A hook of autograd: all ranks of an island come to it in the same order."""
    gradient = parameter.grad
    if gradient is not None:
        distributed.all_reduce(gradient)
        gradient.div_(distributed.get_world_size())


def fsdp_units(module: torch.nn.Module) -> list[Any]:
    """Modules of a model that ``fully_shard`` was called for."""
    found = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(found, "FSDPModule", ())  # since torch 2.6
    return [one for one in module.modules() if isinstance(one, kind)]


def show_parts(module: torch.nn.Module) -> None:
    """Brings the parameters of FSDP's units back to parts. After a forward pass without a backward pass, and inside of
    one, whole ones stand in their places."""
    for unit in fsdp_units(module):
        unit.reshard()
