"""Tells torch's ``DistributedDataParallel`` of us: the algorithm that BAGUA_ALGORITHM names, models that are wrapped
with ``with_bagua`` already, and memory of the backend for its buckets, in which operations copy nothing (torch 2.7 and
newer).

torch has no public place for these, so ``install`` gives the class a constructor and a ``_pre_forward`` around its own.
For memory of the backend torch asks an environment variable each time that it makes buckets: in the constructor, and
before a later forward pass, once it knows the order of gradients. The variable is for all backends and for child
processes, so it is set for these moments alone.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from bagua import csrc
from bagua.base.algorithm_choice import VARIABLE
from bagua.base.errors import BaguaError, ConfigError
from bagua.c10d.names import NAME
from bagua.torch_api.job import environment
from bagua.torch_api.step.module_hook import beside_graphs
from bagua.torch_api.train.compare_ranks import IN_DDP
from bagua.torch_api.train.ddp_hook import hook_named

LOG = logging.getLogger("bagua")
MEMORY_SWITCH = "DDP_DISABLE_COMM_MEM"
WAITING: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()  # Models whose buckets torch will make again


def install() -> None:
    """Looks after models in DDP over a group of backend "bagua" from now on. Called once in a process."""
    if hasattr(DistributedDataParallel.__init__, "_bagua"):
        return
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def construct(self: Any, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        refuse_wrapped(module)  # before torch has changed anything
        with lent(module):
            original(self, module, *args, **options)
        if not self.find_unused_parameters or self.static_graph:  # torch makes buckets again for these alone
            WAITING.add(self)
        IN_DDP[module] = weakref.ref(self)
        if not os.environ.get(VARIABLE, "").strip():
            return
        carriers = carriers_of(self)
        if NAME in carriers:
            choose_algorithm(self, bool(options.get("mixed_precision")))
        else:
            LOG.warning(
                "%s has no effect on this DistributedDataParallel model: backend %s carries its parameters.",
                VARIABLE,
                " and ".join(sorted(carriers)),
            )

    construct._bagua = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]
    _lend_later_buckets()


def lent(module: torch.nn.Module) -> AbstractContextManager[None]:
    """The block in which DDP makes buckets for ``module``. Not where there is a GPU: torch leaves the memory of NCCL
    turned off. Not for complex parameters: torch lays real numbers into these buckets, and asks for complex ones."""
    if torch.cuda.is_available() or any(one.is_complex() for one in module.parameters()):
        return nullcontext()
    return environment.for_a_moment(MEMORY_SWITCH, "0")


def _lend_later_buckets() -> None:
    """Has torch ask for memory of ours where it makes buckets anew."""
    original = getattr(DistributedDataParallel, "_pre_forward", None)  # private, and may move: a test tells
    if original is None:
        return

    @functools.wraps(original)
    def pre_forward(self: Any, *inputs: Any, **options: Any) -> Any:
        if self not in WAITING:
            return original(self, *inputs, **options)
        before = csrc.load_c10d().allocations()
        with lent(self.module):
            found = original(self, *inputs, **options)
        if csrc.load_c10d().allocations() != before:  # allocations tell that buckets were made, which happens once
            WAITING.discard(self)
        return found

    DistributedDataParallel._pre_forward = beside_graphs(pre_forward)  # type: ignore[method-assign]


def carriers_of(model: DistributedDataParallel) -> set[str]:
    """The backends that carry the model's parameters: a group may have one for each kind of device."""
    group_has = distributed_c10d.Backend(distributed.get_backend(model.process_group))
    names = distributed_c10d.BackendConfig(group_has).get_device_backend_map()
    return {str(names.get(parameter.device.type, "none")) for parameter in model.parameters()}


def refuse_wrapped(module: torch.nn.Module) -> None:
    """Raises BaguaError if the model, or a part of it, exchanges by ``with_bagua``."""
    for name, part in module.named_modules():
        if part.__dict__.get("bagua_ddp") is not None:
            raise BaguaError(
                f"{_words(name)} was wrapped with with_bagua() and exchanges by itself: gradients would be exchanged "
                "twice. Leave DistributedDataParallel out, or with_bagua(). [BG606]"
            )


def _words(name: str) -> str:
    return f"Part {name!r} of the model" if name else "The model"


def choose_algorithm(model: DistributedDataParallel, has_hook: bool) -> None:
    """Gives the model the hook that BAGUA_ALGORITHM names. Raises ConfigError for one that does not work in DDP."""
    text = os.environ[VARIABLE].strip()
    try:
        hook = hook_named(text)
    except ConfigError as error:
        raise ConfigError(
            f"{VARIABLE} is {text!r}, and this program trains with DistributedDataParallel. {error}"
        ) from error
    if has_hook:
        raise ConfigError(
            f"{VARIABLE} is {text!r}, but DistributedDataParallel(mixed_precision=...) brings a hook of its own. Use "
            f"torch.autocast instead, or start without {VARIABLE}. [BG606]"
        )
    model.register_comm_hook(model.process_group, hook)
    model.join_hook = refuse_join  # type: ignore[method-assign]


def refuse_join(**_: Any) -> Any:
    """Raises ConfigError: ranks that have no more batches would not take part in the hook's operations."""
    raise ConfigError(
        f"{VARIABLE} is set, and join() of DistributedDataParallel does not go with the algorithm that it chooses. "
        f"Start without {VARIABLE}, or give all ranks the same number of batches. [BG606]"
    )
