"""Algorithms: each says which tensors the ranks of a job exchange in a training step, and when.

An algorithm returns plans, and a plan is a value (``plan.py``); the library and the engine carry them out. Nothing of
ours is imported here: the wrapped model and its buckets are known by the protocols in ``base.py`` alone.
"""

from bagua.algorithms.async_model_average import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl
from bagua.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    AlgorithmRegistry,
    Bucket,
    BucketLayout,
    Communicator,
    DataParallel,
    GlobalAlgorithmRegistry,
    ProcessGroup,
)
from bagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from bagua.algorithms.codec import Codec
from bagua.algorithms.combine import combine
from bagua.algorithms.decentralized import (
    DecentralizedAlgorithm,
    DecentralizedAlgorithmImpl,
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from bagua.algorithms.diloco import (
    DiLoCoAlgorithm,
    DiLoCoAlgorithmImpl,
    StreamingDiLoCoAlgorithm,
    StreamingDiLoCoAlgorithmImpl,
)
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.local_sgd import LocalSGDAlgorithm, LocalSGDAlgorithmImpl
from bagua.algorithms.no_loco import NoLoCoAlgorithm, NoLoCoAlgorithmImpl
from bagua.algorithms.one_bit_adam import OneBitAdamAlgorithm, OneBitAdamAlgorithmImpl, OneBitAdamOptimizer
from bagua.algorithms.plan import AllReduce, Broadcast, Local, Neighbours, Plan
from bagua.algorithms.power_sgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
from bagua.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl, QAdamOptimizer
from bagua.algorithms.top_k import TopKAlgorithm, TopKAlgorithmImpl
from bagua.algorithms.zero_one_adam import ZeroOneAdamAlgorithm, ZeroOneAdamAlgorithmImpl, ZeroOneAdamOptimizer

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AlgorithmRegistry",
    "AllReduce",
    "AsyncModelAverageAlgorithm",
    "AsyncModelAverageAlgorithmImpl",
    "Broadcast",
    "Bucket",
    "BucketLayout",
    "ByteGradAlgorithm",
    "ByteGradAlgorithmImpl",
    "Codec",
    "Communicator",
    "DataParallel",
    "DecentralizedAlgorithm",
    "DecentralizedAlgorithmImpl",
    "DiLoCoAlgorithm",
    "DiLoCoAlgorithmImpl",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "Local",
    "LocalSGDAlgorithm",
    "LocalSGDAlgorithmImpl",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "Neighbours",
    "NoLoCoAlgorithm",
    "NoLoCoAlgorithmImpl",
    "OneBitAdamAlgorithm",
    "OneBitAdamAlgorithmImpl",
    "OneBitAdamOptimizer",
    "Plan",
    "PowerSGDAlgorithm",
    "PowerSGDAlgorithmImpl",
    "ProcessGroup",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "QAdamOptimizer",
    "StreamingDiLoCoAlgorithm",
    "StreamingDiLoCoAlgorithmImpl",
    "TopKAlgorithm",
    "TopKAlgorithmImpl",
    "ZeroOneAdamAlgorithm",
    "ZeroOneAdamAlgorithmImpl",
    "ZeroOneAdamOptimizer",
    "combine",
]

# Names for Algorithm.init, BAGUA_ALGORITHM and `bagua run --algorithm`.
for _name, _algorithm, _description in (
    ("gradient_allreduce", GradientAllReduceAlgorithm, "mean or sum of all ranks' gradients in every step"),
    ("bytegrad", ByteGradAlgorithm, "gradient all-reduce with 8 bits per element"),
    ("decentralized", DecentralizedAlgorithm, "mean of all ranks' weights, or of changing pairs, beside computing"),
    (
        "low_precision_decentralized",
        LowPrecisionDecentralizedAlgorithm,
        "encoded differences of weights to both neighbours in a ring",
    ),
    ("async", AsyncModelAverageAlgorithm, "weights averaged in the background, each rank at its own speed"),
    ("qadam", QAdamAlgorithm, "Adam whose momentum travels in 8 bits, or in one"),
    ("local_sgd", LocalSGDAlgorithm, "mean of all ranks' weights every few steps"),
    ("diloco", DiLoCoAlgorithm, "an outer Nesterov step on what ranks moved in many steps"),
    ("streaming_diloco", StreamingDiLoCoAlgorithm, "DiLoCo in fragments that travel while training goes on"),
    ("no_loco", NoLoCoAlgorithm, "outer steps on the mean of a random pair of ranks"),
    ("power_sgd", PowerSGDAlgorithm, "gradients as products of two thin matrices"),
    ("top_k", TopKAlgorithm, "the largest gradients now, the others when they have grown"),
    ("one_bit_adam", OneBitAdamAlgorithm, "Adam with frozen variance; momentum in one bit per element"),
    ("zero_one_adam", ZeroOneAdamAlgorithm, "1-bit Adam with few full steps and local ones"),
    ("combine", combine, "any of synchronous, centralised, codec and everywhere"),
):
    GlobalAlgorithmRegistry.register(_name, _algorithm, _description)
