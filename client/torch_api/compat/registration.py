"""Registrations: the name under which a tensor is communicated, and the tensor that travels for it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from bagua.torch_api.compat.utils import to_bagua_datatype
from bagua.torch_api.step.bucket import PlanBucket

Getter = Callable[[Any], torch.Tensor | None]
Setter = Callable[[Any, torch.Tensor], Any]

_ATTRIBUTE = "_bagua_registration"
_KNOWN: dict[int, Registration] = {}
"""By id of the tensor: an attribute would be pickled with it, and ``torch.load`` refuse it."""


class BackendTensor:
    """The tensor that travels, as communicators take it: the result of ``bagua_backend_tensor()``."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that really travels, as it is now."""
        return self.registration.effective()

    def name(self) -> str:
        return self.registration.name

    def ptr(self) -> int:
        return self.tensor.data_ptr()

    data_ptr = ptr

    def numel(self) -> int:
        return self.tensor.numel()

    num_elements = num_elements_allocated = numel

    def dtype(self) -> str:
        """Name of the dtype in the original's short form, for example "f32"."""
        return to_bagua_datatype(self.tensor.dtype)

    def device_id(self) -> int:
        """-1 on the CPU."""
        return self.tensor.get_device()


class Registration:
    """The data that make a tensor a Bagua tensor. They don't follow copies of the tensor, and are not pickled."""

    def __init__(
        self, tensor: torch.Tensor, name: str, module_name: str | None, getter: Getter | None, setter: Setter | None
    ) -> None:
        self._tensor = weakref.ref(tensor, functools.partial(_forget, _KNOWN, id(tensor)))
        self.name = name
        self.module_name = module_name
        self.getter = getter
        self.setter = setter
        self.bucket: Callable[[], PlanBucket | None] = lambda: None
        self.backend_tensor = BackendTensor(self)

    @property
    def owner(self) -> torch.Tensor:
        """The registered tensor itself."""
        tensor = self._tensor()
        if tensor is None:
            raise ReferenceError(f"The tensor registered as {self.name!r} is gone: keep a reference to it. [BG411]")
        return tensor

    def effective(self) -> torch.Tensor:
        """The tensor that travels. Raises AttributeError where there is none at the moment."""
        found = self.effective_or_none()
        if found is None:
            raise AttributeError(
                f"Tensor {self.name!r} has nothing to communicate: its getter returned None. If that is .grad, call "
                "bagua_ensure_grad() first. [BG411]"
            )
        return found

    def effective_or_none(self) -> torch.Tensor | None:
        """The tensor that travels; None, for example, for a gradient that has not been computed."""
        return self.owner if self.getter is None else self.getter(self.owner)

    def is_gradient(self, effective: torch.Tensor | None) -> bool:
        """Returns True if ``effective``, which travels now, is the owner's ``.grad``."""
        # Not asked of a weight: the program may set its .grad in another thread, and torch reads it without a lock.
        return self.getter is not None and effective is self.owner.grad

    def replace(self, tensor: torch.Tensor) -> None:
        """``tensor`` travels from now on in the place of the one that did. Raises TypeError if it can't be replaced."""
        if self.setter is not None:
            self.setter(self.owner, tensor)
        elif self.getter is None:
            self.owner.data = tensor
        else:
            self.effective().data = tensor

    def __deepcopy__(self, _: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return (type(None), ())


def registration(tensor: torch.Tensor) -> Registration | None:
    """The registration of a Bagua tensor; None if the tensor is none."""
    found: Registration | None = tensor.__dict__.get(_ATTRIBUTE) or _KNOWN.get(id(tensor))
    return found if found is not None and found._tensor() is tensor else None  # copy.copy takes attributes along


def registered(tensor: torch.Tensor) -> Registration:
    """Returns the registration of a tensor that must have one. Raises TypeError in words otherwise."""
    found = registration(tensor)
    if found is None:
        raise TypeError(
            f"This tensor {list(tensor.shape)} is not a Bagua tensor: call ensure_bagua_tensor(name, module_name) on "
            "it first. A copy of a Bagua tensor is none. [BG411]"
        )
    return found


def register(
    tensor: torch.Tensor,
    name: str,
    module_name: str | None = None,
    getter: Getter | None = None,
    setter: Setter | None = None,
) -> Registration:
    """Makes ``tensor`` a Bagua tensor, or registers it anew."""
    if setter is not None and getter is None:
        raise ValueError(
            f"Tensor {name!r} has a setter_closure and no getter_closure: pass both, or the getter alone. [BG411]"
        )
    made = Registration(tensor, name, module_name, getter, setter)
    tensor.__dict__.pop(_ATTRIBUTE, None)
    if _holds_nothing(getter) and _holds_nothing(setter):
        _KNOWN[id(tensor)] = made
    else:  # the tensor may be in reach of the functions, which must go with it
        setattr(tensor, _ATTRIBUTE, made)
    return made


def _holds_nothing(function: Callable[..., Any] | None) -> bool:
    return function is None or (
        isinstance(function, FunctionType) and not function.__closure__ and not function.__defaults__
    )


def _forget(known: dict[int, Registration], number: int, gone: weakref.ref[torch.Tensor]) -> None:
    """Called at the end of a tensor, which may be the end of the interpreter, too."""
    if number in known and known[number]._tensor is gone:  # the id may belong to a new tensor already
        del known[number]
