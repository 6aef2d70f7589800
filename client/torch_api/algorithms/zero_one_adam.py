"""``bagua.algorithms.zero_one_adam`` beside the algorithms of the original."""

from bagua.algorithms.zero_one_adam import ZeroOneAdamAlgorithm, ZeroOneAdamAlgorithmImpl, ZeroOneAdamOptimizer

__all__ = ["ZeroOneAdamAlgorithm", "ZeroOneAdamAlgorithmImpl", "ZeroOneAdamOptimizer"]
