"""Algorithms under the dotted paths of the original; they live in ``bagua.algorithms``."""

from bagua.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, combine
from bagua.torch_api.algorithms import async_model_average, base, bytegrad, decentralized, gradient_allreduce, q_adam

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "base",
    "bytegrad",
    "combine",
    "decentralized",
    "gradient_allreduce",
    "q_adam",
]
