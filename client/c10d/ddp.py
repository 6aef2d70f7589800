"""Tells torch's ``DistributedDataParallel`` of us: the algorithm that BAGUA_ALGORITHM names, and models that are
wrapped with ``with_bagua`` already.

torch has no public place for either, so ``install`` gives the class a constructor around its own.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from bagua.base.algorithm_choice import VARIABLE
from bagua.base.errors import BaguaError, ConfigError
from bagua.c10d import bucket_memory
from bagua.c10d.names import NAME
from bagua.torch_api.train.compare_ranks import IN_DDP
from bagua.torch_api.train.ddp_hook import hook_named

LOG = logging.getLogger("bagua")


def install() -> None:
    """Looks after models in DDP over a group of backend "bagua" from now on. Called once in a process."""
    if hasattr(DistributedDataParallel.__init__, "_bagua"):
        return
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def construct(self: Any, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        refuse_wrapped(module)
        with bucket_memory.lent(module):
            original(self, module, *args, **options)
        bucket_memory.follow(self)
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
