"""Algorithms: what the ranks of a job exchange in a training step, and when.

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
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.low_precision_decentralized import (
    LowPrecisionDecentralizedAlgorithm,
    LowPrecisionDecentralizedAlgorithmImpl,
)
from bagua.algorithms.plan import AllReduce, Broadcast, Local, Neighbours, Plan
from bagua.algorithms.q_adam import QAdamAlgorithm, QAdamAlgorithmImpl
from bagua.algorithms.q_adam_optimizer import QAdamOptimizer
from bagua.algorithms.registry import AlgorithmRegistry, GlobalAlgorithmRegistry

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
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "Local",
    "LowPrecisionDecentralizedAlgorithm",
    "LowPrecisionDecentralizedAlgorithmImpl",
    "Neighbours",
    "Plan",
    "ProcessGroup",
    "QAdamAlgorithm",
    "QAdamAlgorithmImpl",
    "QAdamOptimizer",
    "combine",
]
