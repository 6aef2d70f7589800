"""ByteGrad: gradient all-reduce in eight bits."""

from __future__ import annotations

from bagua.algorithms.base import Algorithm, ProcessGroup
from bagua.algorithms.gradient_allreduce import GradientAllReduceAlgorithmImpl


class ByteGradAlgorithmImpl(GradientAllReduceAlgorithmImpl):
    def __init__(self, process_group: ProcessGroup, hierarchical: bool = True, average: bool = True) -> None:
        # Reduction is always hierarchical; without ``hierarchical`` ranks of one host exchange encoded values, too.
        super().__init__(process_group, hierarchical, average, "minmax8", everywhere=not hierarchical)


class ByteGradAlgorithm(Algorithm):
    """Averages gradients in one byte for each element. All ranks apply g = C((1/n) · Σ C(g_i)), with C(g) one byte for
    each float32 of g.

    Each message is cut into blocks of 512 elements; C rounds an element to one of 256 levels from its block's minimum
    to its maximum, so that its error is at most (max - min) / 510. (The original has one range per chunk of a rank, and
    anchors the levels at zero: values that are close together far from zero lose everything. A NaN or an infinity
    spoils a whole chunk there, here its block.) There is no error feedback; gradients of other dtypes travel as they
    are. Replicas stay bit-identical. Algorithm of Bagua, Gan et al., "BAGUA: Scaling up Distributed Learning with
    System Relaxations", VLDB 2021, C-LP-S.

    Per step each of h hosts sends and receives 2(h-1)/h · b/4 · (1 + 1/64) bytes for b bytes of gradients, while
    backward still computes. Choose it when the network between hosts limits ``gradient_allreduce``: a quarter of the
    bytes, and rarely any difference in accuracy.

    Args:
        hierarchical: Gradients are encoded between hosts alone; inside a host they are added as they are (with one
            host nothing is encoded). False: every rank's gradient passes through C, and so does the result, as in the
            original, wherever ranks are. That costs time and precision, and saves nothing: for comparisons.
        average: Mean over ranks (True) or sum (False). The mean is that over all ranks, also where hosts have
            different numbers of them.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = hierarchical
        self.average = average

    def reify(self, process_group: ProcessGroup) -> ByteGradAlgorithmImpl:
        return ByteGradAlgorithmImpl(process_group, self.hierarchical, self.average)
