"""Methods of the original that every ``torch.Tensor`` gets when ``bagua.torch_api`` is imported.

A Bagua tensor is an ordinary tensor with a name under which it is communicated, and two functions that say which tensor
really travels: a parameter is registered, and other ranks get its gradient, or its momentum.
"""

from __future__ import annotations

import torch

from bagua.torch_api.compat.backend import Backend, get_backend
from bagua.torch_api.compat.registration import (
    BackendTensor,
    Getter,
    Registration,
    Setter,
    register,
    registered,
    registration,
)


class BaguaTensor(torch.Tensor):
    """Members that ``torch.Tensor`` gets. Never instantiated: ``install`` adds them to ``torch.Tensor`` itself."""

    def is_bagua_tensor(self) -> bool:
        return registration(self) is not None

    def ensure_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """Makes it a Bagua tensor and returns it.

        Args:
            name: Unique within the model.
            module_name: ``model.bagua_module_name``: whose buckets it belongs to. Without one it can't be marked ready.
            getter_closure: Called with this tensor; returns the one that really travels. Default: this one.
            setter_closure: Called with this tensor and another: from then on the other one travels.

        The newest call counts: other arguments register the tensor anew. Without arguments nothing changes for a
        tensor that is a Bagua tensor already. Raises ValueError for a setter without a getter.
        """
        arguments = (name, module_name, getter_closure, setter_closure)
        if registration(self) is None or any(argument is not None for argument in arguments):
            register(self, name or "", module_name, getter_closure, setter_closure)
        return self

    def to_bagua_tensor(
        self,
        name: str | None = None,
        module_name: str | None = None,
        getter_closure: Getter | None = None,
        setter_closure: Setter | None = None,
    ) -> torch.Tensor:
        """A new Bagua tensor on the same memory; this one stays as it is. Arguments as in ``ensure_bagua_tensor``."""
        made = self.detach()
        register(made, name or "", module_name, getter_closure, setter_closure)
        return made

    def bagua_getter_closure(self) -> torch.Tensor | None:
        """The tensor that really travels."""
        return registered(self).effective_or_none()

    def bagua_setter_closure(self, tensor: torch.Tensor) -> None:
        """``tensor`` travels from now on."""
        registered(self).replace(tensor)

    def bagua_backend_tensor(self) -> BackendTensor:
        """The tensor as communicators take it: ``comm.allreduce_inplace(t.bagua_backend_tensor(), op)``."""
        return registered(self).backend_tensor

    def bagua_ensure_grad(self) -> torch.Tensor:
        """Itself, with a gradient: of zeros if there was none. Raises TypeError for a tensor that gets no gradient."""
        if self.grad is None:
            if not self.requires_grad or not self.is_leaf:
                raise TypeError(
                    f"This tensor {list(self.shape)} gets no gradient: bagua_ensure_grad() is for trainable parameters."
                    " [BG411]"
                )
            self.grad = torch.zeros_like(self.detach())
        return self

    def bagua_mark_communication_ready(self) -> None:
        """Says that it may be communicated; when all tensors of its bucket may, the bucket's operations begin.

        Raises TypeError if it is no Bagua tensor, BaguaError if it belongs to no bucket of a model.
        """
        registered_as = registered(self)
        _backend_of(registered_as).mark(registered_as)

    # The original waits for a CUDA stream in the first one alone.
    bagua_mark_communication_ready_without_synchronization = bagua_mark_communication_ready

    def bagua_set_storage(self, storage: torch.UntypedStorage | torch.TypedStorage, storage_offset: int = 0) -> None:
        """The tensor that travels lies at ``storage_offset`` elements in ``storage`` from now on. Copies nothing.

        Raises TypeError if it is no Bagua tensor.
        """
        known = registered(self)
        now = known.effective()
        place = torch.empty(0, dtype=now.dtype, device=now.device)
        known.replace(place.set_(storage, storage_offset, now.shape))  # type: ignore[call-overload]

    @property
    def bagua_tensor_name(self) -> str:
        """The registered name. AttributeError if it is no Bagua tensor."""
        return _asked(self, "bagua_tensor_name").name

    @property
    def bagua_module_name(self) -> str | None:
        """Name of the model to which it belongs. AttributeError if it is no Bagua tensor."""
        return _asked(self, "bagua_module_name").module_name

    @property
    def bagua_backend(self) -> Backend | None:
        """The scheduler of the model's buckets; None without a model."""
        known = _asked(self, "bagua_backend")
        return None if known.module_name is None else _backend_of(known)

    @property
    def _bagua_bucket(self) -> object | None:
        """The bucket in which it travels; None if it is in none."""
        return _asked(self, "_bagua_bucket").bucket()

    @property
    def _bagua_backend_tensor(self) -> BackendTensor:
        """``bagua_backend_tensor()``, as the original keeps it."""
        return _asked(self, "_bagua_backend_tensor").backend_tensor


def _asked(tensor: torch.Tensor, name: str) -> Registration:
    found = registration(tensor)
    if found is None:
        raise AttributeError(f"{name}: this tensor {list(tensor.shape)} is not a Bagua tensor. [BG411]")
    return found


def _backend_of(known: Registration) -> Backend:
    if known.module_name is None:
        raise ValueError(
            f"Tensor {known.name!r} was registered without a model: pass module_name to ensure_bagua_tensor(). [BG411]"
        )
    return get_backend(known.module_name)


def install() -> None:
    """Adds the members of ``BaguaTensor`` to ``torch.Tensor``."""
    for name, member in vars(BaguaTensor).items():
        if "bagua" in name:  # ``vars`` has ``__module__`` and its like, too
            setattr(torch.Tensor, name, member)
