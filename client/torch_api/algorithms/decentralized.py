"""``bagua.algorithms.decentralized`` and its relative in low precision, under the path of the original."""

from bagua.algorithms.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
from bagua.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)

__all__ = [
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
]
