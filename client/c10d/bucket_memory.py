"""Buckets of DDP in memory of the backend, in which operations copy nothing (torch 2.7 and newer).

torch asks an environment variable for it each time that it makes buckets: in the constructor, and before a later
forward pass, once it knows the order of gradients. The variable is for all backends and for child processes, so it is
set for these moments alone.
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bagua import csrc
from bagua.torch_api.job import environment
from bagua.torch_api.step.module_hook import beside_graphs

SWITCH = "DDP_DISABLE_COMM_MEM"
WAITING: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # Models whose buckets torch will make again


def lent(module: torch.nn.Module) -> AbstractContextManager[None]:
    """The block in which DDP makes buckets for ``module``. Not where there is a GPU: torch leaves the memory of NCCL
    turned off. Not for complex parameters: torch lays real numbers into these buckets, and asks for complex ones."""
    if torch.cuda.is_available() or any(one.is_complex() for one in module.parameters()):
        return nullcontext()
    return environment.for_a_moment(SWITCH, "0")


def follow(model: DistributedDataParallel) -> None:
    """The buckets that torch makes of this model later lie there, too."""
    if not model.find_unused_parameters or model.static_graph:
        WAITING.add(model)


def install() -> None:
    """Installs the hook for torch's memory of buckets, once in a process."""
    original = getattr(DistributedDataParallel, "_pre_forward", None)  # private, and may move: a test tells
    if original is None or hasattr(original, "_bagua"):
        return

    @functools.wraps(original)
    def pre_forward(self: Any, *inputs: Any, **options: Any) -> Any:
        if self not in WAITING:
            return original(self, *inputs, **options)
        before = csrc.load_c10d().allocations()
        with lent(self.module):
            found = original(self, *inputs, **options)
        if csrc.load_c10d().allocations() != before:
            WAITING.discard(self)
        return found

    pre_forward._bagua = True  # type: ignore[attr-defined]
    DistributedDataParallel._pre_forward = beside_graphs(pre_forward)  # type: ignore[method-assign]
