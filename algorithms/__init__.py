"""Algorithms: what the ranks of a job exchange in a training step, and when.

An algorithm returns plans, and a plan is a value (``plan.py``); the library and the engine carry them out. Nothing of
ours is imported here: the wrapped model and its buckets are known by the protocols in ``base.py`` alone.
"""

from bagua.algorithms.base import Algorithm, AlgorithmImpl, BucketLayout, DataParallel, ReduceBucket
from bagua.algorithms.codec import Codec
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithm, GradientAllReduceAlgorithmImpl
from bagua.algorithms.plan import AllReduce, Plan
from bagua.algorithms.registry import AlgorithmRegistry, GlobalAlgorithmRegistry

__all__ = [
    "Algorithm",
    "AlgorithmImpl",
    "AlgorithmRegistry",
    "AllReduce",
    "BucketLayout",
    "Codec",
    "DataParallel",
    "GlobalAlgorithmRegistry",
    "GradientAllReduceAlgorithm",
    "GradientAllReduceAlgorithmImpl",
    "Plan",
    "ReduceBucket",
]
