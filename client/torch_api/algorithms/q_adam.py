"""``bagua.algorithms.q_adam`` under the path of the original."""

from bagua.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl
from bagua.algorithms.q_adam_optimizer import QAdamOptimizer

__all__ = ["QAdamAlgorithm", "QAdamAlgorithmImpl", "QAdamOptimizer"]
