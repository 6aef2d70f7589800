"""Algorithms under the dotted paths of the original; they live in ``bagua.algorithms``."""

from bagua.algorithms import Algorithm, AlgorithmImpl, GlobalAlgorithmRegistry, combine
from bagua.torch_api.algorithms import (
    async_model_average,
    base,
    bytegrad,
    decentralized,
    diloco,
    gradient_allreduce,
    local_sgd,
    no_loco,
    one_bit_adam,
    power_sgd,
    q_adam,
    top_k,
    zero_one_adam,
)

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "async_model_average",
    "base",
    "bytegrad",
    "combine",
    "decentralized",
    "diloco",
    "gradient_allreduce",
    "local_sgd",
    "no_loco",
    "one_bit_adam",
    "power_sgd",
    "q_adam",
    "top_k",
    "zero_one_adam",
]
