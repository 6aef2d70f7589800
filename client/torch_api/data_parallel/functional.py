"""Collectives for autograd under the path of the original: ``layers.functional``."""

from bagua.torch_api.layers.functional import DIFFERENTIABLE, all_gather, all_reduce, all_to_all, reduce_scatter

__all__ = ["DIFFERENTIABLE", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]
