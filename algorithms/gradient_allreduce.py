"""Synchronous data parallel training: every rank applies the mean (or the sum) of all ranks' gradients."""

from __future__ import annotations

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_everywhere
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import AllReduce, Plan


class GradientAllReduceAlgorithmImpl(AlgorithmImpl):
    def __init__(
        self,
        process_group: ProcessGroup,
        hierarchical: bool = False,
        average: bool = True,
        codec: Codec | str | None = None,
        everywhere: bool = False,
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.average = average
        self.takes_sparse = average  # they are averaged, whatever the plan of the buckets does
        self.codec = Codec.of(codec)
        self.everywhere = everywhere

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Gives the bucket a plan of one all-reduce."""
        op = "AVG" if self.average else "SUM"
        bucket.set_plan(Plan((AllReduce(op, codec=self.codec, everywhere=self.everywhere),)))


class GradientAllReduceAlgorithm(Algorithm):
    """Averages or sums gradients. All ranks apply the same gradient: g = (1/n) · Σ g_i over the n ranks, or Σ g_i with
    ``average=False``.

    Per step and rank it moves b bytes (all gradients of the model) through shared memory inside the host, and
    2(h-1)/h · b bytes in and out of each of h hosts. Buckets go while backward still computes. Choose it when nothing
    else is known: its result equals training in one process on the global batch. Where the network between hosts is
    the limit, a codec sends fewer bytes: r · 2(h-1)/h · b with r = 1/4 for "minmax8", for example (``Codec`` has the
    table). Results then carry the codec's rounding error, and replicas stay bit-identical.

    Args:
        hierarchical: Kept for programs that pass it. Reduction is always hierarchical (inside the host by shared
            memory, then between hosts), and the mean is that over all ranks, also where hosts have different numbers
            of ranks.
        average: Mean over ranks (True) or sum (False).
        codec: How float32 gradients are encoded between hosts: a name such as "minmax8", a ``Codec``, or None: as they
            are. With one host it has no effect; gradients of other dtypes travel as they are.
        everywhere: With a codec: ranks of one host exchange encoded values, too, so that one host gives what as many
            hosts of one rank would. It costs computation and saves nothing: for comparisons.

    Raises ValueError for ``everywhere`` without a codec.
    """

    def __init__(
        self,
        hierarchical: bool = False,
        average: bool = True,
        codec: Codec | str | None = None,
        everywhere: bool = False,
    ) -> None:
        self.hierarchical = hierarchical
        self.average = average
        self.codec = Codec.of(codec)
        self.everywhere = check_everywhere(everywhere, self.codec)

    def reify(self, process_group: ProcessGroup) -> GradientAllReduceAlgorithmImpl:
        return GradientAllReduceAlgorithmImpl(
            process_group, self.hierarchical, self.average, self.codec, self.everywhere
        )
