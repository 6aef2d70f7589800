"""``bagua.algorithms.local_sgd`` beside the algorithms of the original."""

from bagua.algorithms.local_sgd import LocalSGDAlgorithm, LocalSGDAlgorithmImpl

__all__ = ["LocalSGDAlgorithm", "LocalSGDAlgorithmImpl"]
