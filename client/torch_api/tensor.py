"""Tensor methods under the path of the original: ``compat.tensor``."""

from bagua.torch_api.compat.registration import BackendTensor, Registration, register, registered, registration
from bagua.torch_api.compat.tensor import BaguaTensor, install

__all__ = ["BackendTensor", "BaguaTensor", "Registration", "install", "register", "registered", "registration"]
