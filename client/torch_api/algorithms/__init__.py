"""Algorithms under the dotted paths of the original; they live in ``bagua.algorithms``."""

from bagua.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry
from bagua.torch_api.algorithms import base, gradient_allreduce

__all__ = ["Algorithm", "AlgorithmImpl", "GlobalAlgorithmRegistry", "base", "gradient_allreduce"]
