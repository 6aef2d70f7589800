"""``bagua.algorithms.top_k`` beside the algorithms of the original."""

from bagua.algorithms.top_k import TopKAlgorithm, TopKAlgorithmImpl

__all__ = ["TopKAlgorithm", "TopKAlgorithmImpl"]
