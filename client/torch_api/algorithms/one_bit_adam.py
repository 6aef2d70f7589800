"""``bagua.algorithms.one_bit_adam`` beside the algorithms of the original."""

from bagua.algorithms.one_bit_adam import OneBitAdamAlgorithm, OneBitAdamAlgorithmImpl, OneBitAdamOptimizer

__all__ = ["OneBitAdamAlgorithm", "OneBitAdamAlgorithmImpl", "OneBitAdamOptimizer"]
