"""Notices parameters that are trained now and were not when the model was wrapped: nothing exchanges them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.shards import fsdp_units, is_shard, is_sharded
from bagua.torch_api.step.parameters import trainable_parameters

LOOK_EVERY = 10
"""Passes between looks (0.1 to 0.3 ms) that nothing has asked for: ``ModuleList.insert`` registers nothing."""


class UntrackedParameters:
    """Watches one model. Looks when parameters or modules were registered anywhere in the process, and when frozen
    ones are trained.

    It looks in moments when the model is as the program left it: ``functional_call`` puts other tensors into it for the
    time of a forward pass.
    """

    def __init__(self, module: torch.nn.Module, ignored: frozenset[str], known: Iterable[torch.Tensor]) -> None:
        """``known``: parameters that are exchanged."""
        self._module = module
        self._ignored = ignored
        self._known = set(known)
        # FSDP may leave whole parameters in the place of these after a pass, which tensor parallelism divides in turn.
        self._divided = {name: _division(one) for name, one in module.named_parameters() if is_shard(one)}
        self._find_frozen()
        self._passes = 0
        self._registered = False
        self._counts: set[int] = set()  # of gradients in a pass

    def watch(self) -> list[Any]:
        """Hooks of the process. Returns what removes them."""
        me = weakref.ref(self)  # they don't keep a model alive that is dropped without ``close``

        def note(*_: Any) -> None:
            if (found := me()) is not None:
                found._registered = True

        handles = [register_module_parameter_registration_hook(note), register_module_module_registration_hook(note)]
        for handle in handles:
            weakref.finalize(self, handle.remove).atexit = False  # the interpreter's end removes hooks itself
        return handles

    def found(self) -> bool:
        """Returns True if there is one, as far as anything has told. Outside of ``functional_call``."""
        return (self._registered or self._thawed()) and self._look() is not None

    def refuse(self) -> None:
        """Raises BaguaError for a newcomer. Called at the first gradient of a pass. In a sharded model whole parameters
        may stand in the place of parts then: it is looked at after the pass."""
        if self._divided:
            return
        self._passes += 1
        if self._registered or (self._frozen and self._thawed()) or self._passes % LOOK_EVERY == 2:
            self._refuse()

    def refuse_registered(self) -> None:
        """Raises BaguaError for a newcomer before a step of an optimizer: no other parameter need have had a
        gradient."""
        if self._registered:
            self._refuse()

    def refuse_unlike(self, gradients: int) -> None:
        """Raises BaguaError for a newcomer at the end of a pass that has brought so many gradients. If none has brought
        as many, a parameter may have been replaced by one that nothing told of, as in ``layer._parameters``. One of a
        sharded model that was thawed brings none: it has no hook."""
        if gradients not in self._counts or (self._divided and self._thawed()):
            self._counts.add(gradients)
            self._refuse()

    def _find_frozen(self) -> None:
        self._frozen = [one for one in self._module.parameters() if not (one.requires_grad or one in self._known)]

    def _thawed(self) -> bool:
        return any(parameter.requires_grad for parameter in self._frozen)

    def _look(self) -> str | None:
        self._find_frozen()
        # Cheap: names and checks are only for one that is found.
        if any(one.requires_grad and one not in self._known for one in self._module.parameters()):
            for name, parameter in trainable_parameters(self._module, self._ignored):
                if parameter not in self._known and self._divided.get(name) in (None, _division(parameter)):
                    return name
        self._registered = False
        return None

    def _refuse(self) -> None:
        name = self._look()
        if name is not None and not self._divided and (is_sharded(self._module) or fsdp_units(self._module)):
            raise BaguaError(
                f"Parameter {name} was divided among ranks after with_bagua, which exchanges it no more: call "
                "fully_shard, or parallelize_module, before with_bagua. [BG618]"
            )
        if name is not None:
            raise BaguaError(
                f"Parameter {name} is trained now, but was not when the model was wrapped (it was frozen, not there "
                "yet, or loaded with assign=True): nothing exchanges it, and replicas would drift apart. After such a "
                "change wrap the model again, on all ranks (with_bagua(), or DistributedDataParallel()), or put the "
                "name into the module's _bagua_params_and_buffers_to_ignore before it is wrapped. [BG602]"
            )


def _division(parameter: Any) -> tuple[Any, Any] | None:
    return (parameter.device_mesh, parameter.placements) if is_shard(parameter) else None
