"""Common base of algorithms that exchange weights every few optimizer steps, and train alone in between."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bagua.algorithms.base import REFUSES_WEIGHTS, AlgorithmImpl, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import COPY, GRADIENT, SCRATCH, WEIGHT, AllReduce, Local, Plan
from bagua.algorithms.warm_up import NO_WARM_UP, WarmUp
from bagua.algorithms.weights import check_optimizers, copy_weights, subtract

ANCHOR = "anchor"  # Slot: the weights after the last exchange, the same on all ranks that take part in it

# Slot: how far this rank has moved from the anchor, ``anchor - weight``; after the exchange the mean of it.
DELTA = "delta"


class PeriodicImpl(AlgorithmImpl):
    """``warm_up.steps`` optimizer steps with gradient all-reduce, then local steps with an exchange when ``due``.

    A step is a step of the last of the optimizers given to ``with_bagua``. A subclass gives buckets of weights their
    plan (``plan_weights``), and may change when (``due``) and how (``after_step``) they are exchanged.
    """

    newcomers_take: tuple[str, ...] = ("steps", "exchanged")
    refuses_join = REFUSES_WEIGHTS

    def __init__(self, process_group: ProcessGroup, interval: int, warm_up: WarmUp = NO_WARM_UP) -> None:
        super().__init__(process_group)
        self.interval = interval
        self.warm_up = warm_up
        self.steps = 0
        self.exchanged = GRADIENT if warm_up.steps > 0 else WEIGHT

    def need_reset(self) -> bool:
        """True once, when the warm-up is over: buckets of gradients make room for buckets of weights."""
        if self.exchanged == WEIGHT or self.steps < self.warm_up.steps:
            return False
        self.exchanged = WEIGHT
        return True

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Chooses the same tensors as for gradients. Raises ValueError for optimizers that don't fit."""
        check_optimizers(bagua_ddp, type(self).__name__.removesuffix("Impl"))
        return super().init_tensors(bagua_ddp)

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """The bucket's plan, as the phase wants it."""
        if self.exchanged == GRADIENT:
            self.plan_gradients(bagua_ddp, bucket)
        else:
            self.plan_weights(bagua_ddp, bucket)

    def plan_gradients(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Gives a bucket of gradients its plan, in the warm-up."""
        bucket.set_plan(self.warm_up.plan())

    def plan_weights(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Gives a bucket of weights its plan, after the warm-up."""
        raise NotImplementedError(f"{type(self).__name__} must override plan_weights. [BG306]")

    def init_post_optimizer_step_hook(self, bagua_ddp: DataParallel) -> Callable[[torch.optim.Optimizer], None]:
        """Counts steps, and exchanges when it is time."""

        def after(optimizer: torch.optim.Optimizer) -> None:
            if optimizer is not bagua_ddp.bagua_optimizers[-1]:  # the last of several ends the step
                return
            self.steps += 1
            if self.exchanged == WEIGHT:
                self.after_step(bagua_ddp, self.steps - self.warm_up.steps)

        return after

    def due(self, step: int) -> bool:
        """True if weights are exchanged after this step. Steps count from 1 at the end of the warm-up."""
        return step % self.interval == 0

    def after_step(self, bagua_ddp: DataParallel, step: int) -> None:
        """Exchanges all buckets where it is time."""
        if self.due(step):
            bagua_ddp.exchange()


def plan_differences(bucket: Bucket, codec: Codec | None, merge: Callable[[Bucket], None]) -> None:
    """The plan: DELTA = ANCHOR - WEIGHT; the mean of DELTA over all ranks, encoded between hosts; ``merge``, which
    writes ANCHOR and WEIGHT from it. Adds both slots; the anchor begins as the weights are now.

    Weights never pass through a codec, only their differences do: what encoding loses is small, and with error feedback
    it is in the next difference.
    """
    bucket.add_slot(ANCHOR, communicated=False, on_change=COPY)
    copy_weights(bucket, ANCHOR)
    bucket.add_slot(DELTA, on_change=SCRATCH)
    differ = Local(lambda one: subtract(one, ANCHOR, WEIGHT, DELTA), "difference", (ANCHOR, WEIGHT), (DELTA,))
    average = AllReduce("AVG", src=DELTA, dst=DELTA, codec=codec)
    bucket.set_plan(Plan((differ, average, Local(merge, "merge", (DELTA, ANCHOR), (ANCHOR, WEIGHT)))))
