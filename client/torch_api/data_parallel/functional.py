"""Collectives for autograd under the path of the original: ``compat.functional``."""

from bagua.torch_api.compat.functional import DIFFERENTIABLE, all_reduce

__all__ = ["DIFFERENTIABLE", "all_reduce"]
