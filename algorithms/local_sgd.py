"""Local SGD: ranks train alone and average their weights every few steps."""

from __future__ import annotations

from bagua.algorithms.base import Algorithm, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_count
from bagua.algorithms.codec import Codec
from bagua.algorithms.periodic import ANCHOR, DELTA, PeriodicImpl, plan_differences
from bagua.algorithms.plan import WEIGHT, AllReduce, Plan
from bagua.algorithms.warm_up import WarmUp
from bagua.algorithms.weights import codec_of_differences, set_weights


class LocalSGDAlgorithmImpl(PeriodicImpl):
    def __init__(self, process_group: ProcessGroup, interval: int, warm_up: WarmUp, codec: Codec | None) -> None:
        super().__init__(process_group, interval, warm_up)
        self.codec = codec

    def plan_weights(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """The mean of the weights; with a codec, the mean of what they have moved since the last one."""
        if self.codec is None:
            bucket.set_plan(Plan((AllReduce("AVG", src=WEIGHT, dst=WEIGHT),)))
        else:
            plan_differences(bucket, self.codec, _move_to_mean)


def _move_to_mean(bucket: Bucket) -> None:
    bucket.slot(ANCHOR).sub_(bucket.slot(DELTA))
    set_weights(bucket, ANCHOR)


class LocalSGDAlgorithm(Algorithm):
    """Every rank takes H steps of its own, then weights become their mean: x = (1/n) · Σ x_i after every H-th step.

    Stich, "Local SGD converges fast and communicates little", 2019. With ``warmup_steps`` it is post-local SGD (Lin et
    al., "Don't use large mini-batches, use local SGD", 2020): gradient all-reduce for the first steps, when weights
    move fast, local steps after them. Any optimizer; its state stays each rank's own.

    Per exchange 2(h-1)/h · b bytes go in and out of each of h hosts, for b bytes of weights: 1/H of that per step.
    With a codec, what crosses is the difference to the last mean, and its error is fed back: r/H of it. Between
    exchanges replicas differ; after the last step of the training they do unless it was an H-th one.

    Choose it when the network is so slow that even encoded gradients take longer than the step, and when one exchange
    in H steps may stop the training for a moment. ``DiLoCoAlgorithm`` allows a larger H.

    Args:
        interval: H. 4 to 8 kept the accuracy of gradient all-reduce on the examples.
        warmup_steps: Optimizer steps with gradient all-reduce before the first local one.
        codec: How float32 differences are encoded between hosts; None: weights travel as they are.
        warmup_codec: How gradients are encoded between hosts in the warm-up; None: as they are.
    """

    def __init__(
        self,
        interval: int = 4,
        warmup_steps: int = 0,
        codec: Codec | str | None = None,
        warmup_codec: Codec | str | None = None,
    ) -> None:
        self.interval = check_count("interval", interval, 1)
        self.warm_up = WarmUp.of(warmup_steps, warmup_codec)
        self.codec = codec_of_differences(codec)

    def reify(self, process_group: ProcessGroup) -> LocalSGDAlgorithmImpl:
        return LocalSGDAlgorithmImpl(process_group, self.interval, self.warm_up, self.codec)
