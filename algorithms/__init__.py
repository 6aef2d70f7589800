"""Algorithms: what the ranks of a job exchange in a training step, and when.

An algorithm returns plans, and a plan is a value (``plan.py``); the library and the engine carry them out. Nothing of
ours is imported here: the wrapped model and its buckets are known by the protocols in ``base.py`` alone.
"""

from bagua.algorithms.base import (
    Algorithm,
    AlgorithmImpl,
    Bucket,
    BucketLayout,
    Communicator,
    DataParallel,
    ProcessGroup,
)
from bagua.algorithms.codec import Codec
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.plan import AllReduce, Broadcast, Local, Neighbours, Plan
from bagua.algorithms.registry import AlgorithmRegistry, GlobalAlgorithmRegistry

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AlgorithmRegistry",
    "AllReduce",
    "Broadcast",
    "Bucket",
    "BucketLayout",
    "Codec",
    "Communicator",
    "DataParallel",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "Local",
    "Neighbours",
    "Plan",
    "ProcessGroup",
]
