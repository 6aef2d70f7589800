"""Decentralised SGD on a ring, with encoded differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucket, DataParallel, ProcessGroup, no_hook
from bagua.algorithms.checks import check_count
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import (
    EVERYONE,
    HOST,
    LEADERS,
    SCRATCH,
    WEIGHT,
    AllReduce,
    Broadcast,
    Local,
    Neighbours,
    Plan,
    Step,
)
from bagua.algorithms.registry import GlobalAlgorithmRegistry
from bagua.algorithms.weights import check_optimizers, copy_weights, expose, set_weights

NOW = "now"
OWN = "own_weight"
LEFT = "left_peer_weight"
RIGHT = "right_peer_weight"
DIFFERENCE = "difference"
FROM_LEFT = "from_left"
FROM_RIGHT = "from_right"
LOST = "lost"
REPLICAS = (OWN, LEFT, RIGHT)


class LowPrecisionDecentralizedAlgorithmImpl(AlgorithmImpl):
    """``LowPrecisionDecentralizedAlgorithm`` at work on one model. ``steps``: optimizer steps so far."""

    exchanged = WEIGHT
    follows_arrival = False
    newcomers_take = ("steps",)

    def __init__(
        self,
        process_group: ProcessGroup,
        hierarchical: bool = True,
        communication_interval: int = 1,
        codec: Codec | str | None = "minmax8",
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.communication_interval = communication_interval
        self.codec = Codec.of(codec)
        self.steps = 0

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Finds the ring. Raises ValueError for fused optimizers, and for parameters that no optimizer has."""
        hosts, everyone = self.process_group.hosts, self.process_group.get_global_communicator()
        me = everyone.ranks[everyone.rank()]
        self._units = len(hosts) if self.hierarchical else everyone.nranks()
        self._in_ring = not self.hierarchical or any(me == host[0] for host in hosts)
        check_optimizers(bagua_ddp, "LowPrecisionDecentralizedAlgorithm")
        return super().init_tensors(bagua_ddp)

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Inside the host the mean, between hosts (or all ranks) the exchange with both neighbours."""
        bucket.add_slot(NOW, on_change=SCRATCH)
        take = Local(_take, "weights as they are", reads=(WEIGHT,), writes=(NOW,))
        give = Local(_give, "weights as all know them", reads=(NOW,), writes=(WEIGHT,))
        inside: tuple[Step, ...] = (AllReduce("AVG", NOW, NOW, over=HOST),) if self.hierarchical else ()
        ring = self._ring(bucket) if self._units > 1 and self._in_ring else ()
        back: tuple[Step, ...] = (Broadcast(NOW, over=HOST),) if self.hierarchical and self._units > 1 else ()
        bucket.set_plan(Plan((take, *inside, *ring, *back, give)))
        if not ring:
            for name in REPLICAS:
                bucket.add_slot(name, communicated=False)
                copy_weights(bucket, name)
        weight, left, right = (bucket.slot(name) for name in REPLICAS)
        expose(bucket, _weight=weight, _left_peer_weight=left, _right_peer_weight=right)

    def _ring(self, bucket: Bucket) -> tuple[Step, ...]:
        for name in REPLICAS:
            bucket.add_slot(name, communicated=False)
            copy_weights(bucket, name)
        for name in (DIFFERENCE, FROM_LEFT, FROM_RIGHT):
            bucket.add_slot(name, on_change=SCRATCH)
        codec = self.codec if bucket.dtype is torch.float32 else None
        fed_back = codec is not None and bool(codec.error_feedback)
        kept = (LOST,) if fed_back else ()
        if codec is not None and fed_back:
            bucket.add_slot(LOST, communicated=False)
            codec = replace(codec, error_feedback=False)  # done here

        def differ(bucket: Bucket) -> None:
            difference = bucket.slot(DIFFERENCE)
            difference.copy_(bucket.slot(NOW))
            difference.add_(bucket.slot(LEFT), alpha=1 / 3).add_(bucket.slot(RIGHT), alpha=1 / 3)
            difference.add_(bucket.slot(OWN), alpha=-5 / 3)
            if fed_back:
                bucket.slot(LOST).add_(difference)
                difference.copy_(bucket.slot(LOST))

        def follow(bucket: Bucket) -> None:
            bucket.slot(OWN).add_(bucket.slot(DIFFERENCE))
            bucket.slot(LEFT).add_(bucket.slot(FROM_LEFT))
            bucket.slot(RIGHT).add_(bucket.slot(FROM_RIGHT))
            bucket.slot(NOW).copy_(bucket.slot(OWN))
            if fed_back:
                bucket.slot(LOST).sub_(bucket.slot(DIFFERENCE))

        arrived = (DIFFERENCE, FROM_LEFT, FROM_RIGHT)
        over = LEADERS if self.hierarchical else EVERYONE
        return (
            Local(differ, "difference to the replica", (NOW, *REPLICAS, *kept), (DIFFERENCE, *kept)),
            Neighbours(DIFFERENCE, *arrived, codec=codec, over=over),
            Local(follow, "replicas follow", (*REPLICAS, *arrived, *kept), (*REPLICAS, NOW, *kept)),
        )

    def follow_members(self, bagua_ddp: DataParallel) -> bool:
        """Neighbours are others, and nobody has replicas of their weights: all begin anew with rank 0's."""
        return False

    def init_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[str, torch.nn.Parameter], None]:
        """Gradients stay this rank's own."""
        return no_hook

    def init_post_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[], None]:
        """Returns a function that does nothing: there is nothing to wait for."""
        return no_hook

    def init_post_optimizer_step_hook(self, bagua_ddp: DataParallel) -> Callable[[torch.optim.Optimizer], None]:
        """Exchanges after the last optimizer's step, every ``communication_interval`` steps."""

        def after(optimizer: torch.optim.Optimizer) -> None:
            if optimizer is not bagua_ddp.bagua_optimizers[-1]:
                return
            if self.steps % self.communication_interval == 0:
                for bucket in bagua_ddp.bagua_buckets:
                    bucket.start()
                bagua_ddp.join(bagua_ddp.bagua_buckets)
            self.steps += 1

        return after


def _take(bucket: Bucket) -> None:
    copy_weights(bucket, NOW)


def _give(bucket: Bucket) -> None:
    set_weights(bucket, NOW)


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    """Ranks on a ring keep replicas of their neighbours' weights, and send each other encoded differences.

    After the optimizer's step has made x of a rank's weights W, with L and R its replicas of both neighbours':

        d = x + L/3 + R/3 - 5W/3;   W += C(d);   L += C(d_left);   R += C(d_right);   x = W

    that is, (W + L + R)/3 + (x - W), of which the part that differs from W travels as C(d). A replica equals its
    owner's weights, bit for bit: all of them add the same message. Tang et al., "Communication Compression for
    Decentralized Training", NeurIPS 2018 (DCD-PSGD); Bagua's D-LP-S.

    Per step each rank, or each host with ``hierarchical``, sends 2 r b bytes and receives as much, for b bytes of
    weights; r is the codec's share, 1/4 · (1 + 1/64) for "minmax8" (one message instead of two where there are two).
    The exchange follows the optimizer's step, and is waited for. Choose it on slow networks with many hosts: traffic
    per host does not grow with their number, and each waits for two others alone. With two neighbours' weights in
    memory, and what travels, it needs 7 times the memory of the weights (8 with error feedback).

    Args:
        hierarchical: Hosts form the ring: ranks of a host average their weights as they are, their first rank
            exchanges, and all take what it gets. False: ranks form it, inside and between hosts alike.
        communication_interval: Optimizer steps from one exchange to the next, the first step's included.
        codec: C: a name, a ``Codec``, or None, which sends d as it is. Those with error feedback add what C lost to the
            next d; "minmax8" has none by default, as in the original, but blocks with a range of their own (``Codec``).

    One rank, or one host with ``hierarchical``, has no neighbours: nothing is encoded, ranks of the host average.
    ``with_bagua`` raises ValueError for a parameter that no optimizer has, and for a fused optimizer. Each bucket's
    ``_weight``, ``_left_peer_weight`` and ``_right_peer_weight`` are W, L and R, flat; with ``hierarchical`` those of
    a host's first rank are kept up to date.
    """

    def __init__(
        self, hierarchical: bool = True, communication_interval: int = 1, codec: Codec | str | None = "minmax8"
    ) -> None:
        self.hierarchical = hierarchical
        self.communication_interval = check_count("communication_interval", communication_interval, 1)
        self.codec = Codec.of(codec)

    def reify(self, process_group: ProcessGroup) -> LowPrecisionDecentralizedAlgorithmImpl:
        return LowPrecisionDecentralizedAlgorithmImpl(
            process_group, self.hierarchical, self.communication_interval, self.codec
        )


GlobalAlgorithmRegistry.register(
    "low_precision_decentralized",
    LowPrecisionDecentralizedAlgorithm,
    "encoded differences of weights to both neighbours in a ring",
)
