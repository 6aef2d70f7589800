"""``bagua.algorithms.base`` under the path of the original."""

from bagua.algorithms.base import Algorithm, AlgorithmImpl
from bagua.algorithms.registry import AlgorithmRegistry, GlobalAlgorithmRegistry

__all__ = ["Algorithm", "AlgorithmImpl", "AlgorithmRegistry", "GlobalAlgorithmRegistry"]
