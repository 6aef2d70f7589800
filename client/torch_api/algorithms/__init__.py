"""Algorithms under the dotted paths of the original; they live in ``bagua.algorithms``."""

import sys
from types import ModuleType

from bagua.algorithms import (
    Algorithm,
    AlgorithmImpl,
    GlobalAlgorithmRegistry,
    async_model_average,
    base,
    bytegrad,
    combine,
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

# Programs import modules by these paths, too: `from bagua.torch_api.algorithms.bytegrad import ByteGradAlgorithm`.
for _name in __all__:
    if isinstance(_module := globals()[_name], ModuleType):
        sys.modules[f"{__name__}.{_name}"] = _module
