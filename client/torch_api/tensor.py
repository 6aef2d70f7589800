"""Tensor methods under the path of the original: ``compat.tensor``."""

from bagua.torch_api.compat.tensor import (
    BackendTensor,
    BaguaTensor,
    Registration,
    install,
    register,
    registered,
    registration,
)

__all__ = ["BackendTensor", "BaguaTensor", "Registration", "install", "register", "registered", "registration"]
