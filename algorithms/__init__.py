"""Algorithms: each says which tensors the ranks of a job exchange in a training step, and when.

An algorithm returns plans, and a plan is a value (``plan.py``); the library and the engine carry them out. Nothing of
ours is imported here: the wrapped model and its buckets are known by the protocols in ``base.py`` alone.
"""

from bagua.algorithms.async_model_average import AsyncModelAverageAlgorithm, AsyncModelAverageAlgorithmImpl
from bagua.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    Bucket,
    BucketLayout,
    Communicator,
    DataParallel,
    ProcessGroup,
)
from bagua.algorithms.bytegrad import ByteGradAlgorithm, ByteGradAlgorithmImpl
from bagua.algorithms.codec import Codec
from bagua.algorithms.combine import combine
from bagua.algorithms.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
from bagua.algorithms.diloco import (
    DiLoCoAlgorithm,
    DiLoCoAlgorithmImpl,
    StreamingDiLoCoAlgorithm,
    StreamingDiLoCoAlgorithmImpl,
)
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.local_sgd import LocalSGDAlgorithm, LocalSGDAlgorithmImpl
from bagua.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from bagua.algorithms.no_loco import NoLoCoAlgorithm, NoLoCoAlgorithmImpl
from bagua.algorithms.one_bit_adam import OneBitAdamAlgorithm, OneBitAdamAlgorithmImpl, OneBitAdamOptimizer
from bagua.algorithms.plan import AllReduce, Broadcast, Local, Neighbours, Plan
from bagua.algorithms.power_sgd import PowerSGDAlgorithm, PowerSGDAlgorithmImpl
from bagua.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl
from bagua.algorithms.q_adam_optimizer import QAdamOptimizer
from bagua.algorithms.registry import AlgorithmRegistry, GlobalAlgorithmRegistry
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
