"""``bagua.algorithms.power_sgd`` beside the algorithms of the original."""

from bagua.algorithms.power_sgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl

__all__ = ["PowerSGDAlgorithm", "PowerSGDAlgorithmImpl"]
