"""Top-k: only the largest gradients travel, and the others wait."""

from __future__ import annotations

from bagua.algorithms.base import Algorithm, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.codec import DEFAULT_DENSITY, Codec
from bagua.algorithms.plan import AllReduce, Plan
from bagua.algorithms.warm_up import WarmedUpImpl, WarmUp


class TopKAlgorithmImpl(WarmedUpImpl):
    def __init__(self, process_group: ProcessGroup, codec: Codec, warm_up: WarmUp, everywhere: bool) -> None:
        super().__init__(process_group, warm_up)
        self.codec = codec
        self.everywhere = everywhere

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Gives the bucket a plan of one sparse all-reduce."""
        encoded = AllReduce("AVG", codec=self.codec, everywhere=self.everywhere)
        bucket.set_plan(Plan((encoded,)) if self.compresses else self.warm_up.plan())


class TopKAlgorithm(Algorithm):
    """The share d of gradients that are largest travels; what stays behind is added to the next step's.

    Aji and Heafield, "Sparse communication for distributed gradient descent", 2017; with error feedback Stich et al.,
    "Sparsified SGD with memory", 2018. For y_p, the sum over host p's ranks of g_i, with e_p what it has not sent yet:

        y_p = Σ g_i + e_p;   sent_p = the largest of each 16384;   e_p = y_p - sent_p;   g = top(Σ sent_p / n)

    Per step 2(h-1)/h · 1.5 d · b bytes go in and out of each of h hosts, for b bytes of gradients (a value and its
    position take 6 bytes); the mean is encoded like the sums, and its error fed back, too. A host keeps one float32
    per element. Memory passes for the selection cost more than 8 bits do.

    Choose it where a few elements carry the gradient: embeddings, late training. What stays behind arrives late, in
    lumps: adaptive optimizers square the lumps, and momentum amplifies them.

    Args:
        density: d, in (0, 1]. On digits with AdamW 0.05 kept the accuracy of full gradients, 0.01 without a warm-up
            lost two points.
        warmup_steps: Steps with all-reduce of all gradients before the first sparse one; a tenth of the training.
        everywhere: Ranks of one host exchange sparse gradients, too, instead of full ones.
        warmup_codec: How gradients are encoded between hosts in the warm-up; None: as they are.
    """

    def __init__(
        self,
        density: float = DEFAULT_DENSITY,
        warmup_steps: int = 0,
        everywhere: bool = False,
        warmup_codec: Codec | str | None = None,
    ) -> None:
        self.codec = Codec("topk", density)
        self.warm_up = WarmUp.of(warmup_steps, warmup_codec)
        self.everywhere = everywhere

    def reify(self, process_group: ProcessGroup) -> TopKAlgorithmImpl:
        return TopKAlgorithmImpl(process_group, self.codec, self.warm_up, self.everywhere)
