"""Decentralised SGD: ranks average weights, all of them or in pairs, while they compute gradients; or they exchange
encoded differences with both neighbours of a ring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bagua.algorithms.averaging import PEER, mean_of_all, mean_of_pair
from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucket, BucketLayout, DataParallel, ProcessGroup, no_hook
from bagua.algorithms.checks import check_count, check_everywhere, check_mode
from bagua.algorithms.codec import Codec
from bagua.algorithms.pairs import Pairs
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
    Over,
    Plan,
    Step,
)
from bagua.algorithms.weights import (
    check_optimizers,
    codec_of_differences,
    copy_weights,
    expose,
    fits,
    one_bucket_per_dtype,
    set_weights,
    where_needed,
)

NOW = "now"
OWN = "own_weight"
LEFT = "left_peer_weight"
RIGHT = "right_peer_weight"
DIFFERENCE = "difference"
FROM_LEFT = "from_left"
FROM_RIGHT = "from_right"
LOST = "lost"
REPLICAS = (OWN, LEFT, RIGHT)


class DecentralizedAlgorithmImpl(AlgorithmImpl):
    """``DecentralizedAlgorithm``, which explains the arguments, at work on one model. ``passes``: forward passes so far
    that could exchange."""

    exchanged = WEIGHT
    follows_arrival = False
    newcomers_take = ("passes",)

    def __init__(
        self,
        process_group: ProcessGroup,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
        codec: Codec | str | None = None,
        everywhere: bool = False,
    ) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.peer_selection_mode = check_mode(peer_selection_mode)
        self.communication_interval = check_count("communication_interval", communication_interval, 1)
        self._wanted_codec = codec_of_differences(codec)  # kept: a newcomer encodes if the others do
        self.codec = where_needed(self._wanted_codec, everywhere, process_group)
        self.everywhere = everywhere and self.codec is not None
        self.passes = 0
        self._under_way = False
        self._pairs = Pairs(process_group, self.hierarchical) if self.peer_selection_mode == "shift_one" else None

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BucketLayout]:
        """Makes one bucket of all weights, or one for each dtype."""
        return one_bucket_per_dtype(tensors)

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Mean of the weights as they are when the forward pass begins; it replaces them when backward is over."""
        if self._pairs is None:
            steps = mean_of_all(bucket, self.codec, self.everywhere)
        else:
            steps = mean_of_pair(bucket, self._pairs, self.codec, self.everywhere)
        adopt = Local(lambda one: set_weights(one, PEER), "weights become the mean", reads=(PEER,), writes=(WEIGHT,))
        bucket.set_plan(Plan((*steps, adopt)))
        expose(bucket, _peer_weight=bucket.slot(PEER))

    def follow_members(self, bagua_ddp: DataParallel) -> bool:
        """Pairs are formed again. With a codec they have agreed on references that others don't know: all begin anew
        with rank 0's weights."""
        if self._pairs is None:
            return True
        self._pairs.form()
        # Without a codec the exchange is repeated with the members that are left.
        self._under_way = self._under_way and self.codec is None
        return self.codec is None

    def tell_newcomers(self) -> dict[str, Any]:
        """The round of pairs, too, and whether anything is encoded: that was settled when the model was wrapped."""
        round = 0 if self._pairs is None else self._pairs.round
        return {**super().tell_newcomers(), "round": round, "encodes": self.codec is not None}

    def hear_as_newcomer(self, told: dict[str, Any]) -> None:
        """Pairs as the others have them."""
        super().hear_as_newcomer(told)
        self.codec = self._wanted_codec if told["encodes"] else None
        if self._pairs is not None:
            self._pairs.form()
            self._pairs.round = told["round"]

    def init_forward_pre_hook(self, bagua_ddp: DataParallel) -> Callable[[Any], None]:
        """Starts the exchange, every ``communication_interval`` passes."""

        def start(_: Any) -> None:
            if not (torch.is_grad_enabled() and bagua_ddp.require_backward_grad_sync):
                return  # no backward pass would end it
            self._finish(bagua_ddp)  # where the last backward did not come
            if self.passes % self.communication_interval == 0:
                self._under_way = True
                for bucket in bagua_ddp.bagua_buckets:
                    bucket.start()
            self.passes += 1

        return start

    def init_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[str, torch.nn.Parameter], None]:
        """Gradients stay this rank's own."""
        return no_hook

    def init_post_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[], None]:
        """Returns a function that waits for the exchange."""
        return lambda: self._finish(bagua_ddp)

    def _finish(self, bagua_ddp: DataParallel) -> None:
        if not self._under_way:
            return
        self._under_way = False
        bagua_ddp.join(bagua_ddp.bagua_buckets)
        if self._pairs is not None:
            self._pairs.round += 1


class DecentralizedAlgorithm(Algorithm):
    """Ranks average their weights instead of their gradients: x_i(t+1) = mean(x_j(t)) - η g_i(x_i(t)).

    The mean is taken over all ranks ("all"), or over two ("shift_one"), while forward and backward compute the
    gradient at the old weights; then the optimizer applies that rank's own gradient. Lian et al., "Can Decentralized
    Algorithms Outperform Centralized Algorithms?", NeurIPS 2017; Bagua's D-FP-S. In round s rank i < n/2 meets rank
    n/2 + (s + i) mod n/2: after n/2 rounds each has met all of the other half.

    Per exchange "all" moves 2(h-1)/h · b bytes in and out of each of h hosts for b bytes of weights; "shift_one" b in
    and out of each rank (of each host with ``hierarchical``) whose peer is on another host. Nobody waits for the
    exchange unless it takes longer than forward and backward. Choose "shift_one" for many ranks or networks with a long
    delay: a step talks to one other rank, not to all. Replicas differ between exchanges, and with "shift_one" always:
    to evaluate, take any of them, or their mean.

    Args:
        hierarchical: Pairs are hosts: all ranks of both take the mean over them, each counted once. False: pairs are
            ranks. With "all" the result is the same either way, the mean over all ranks.
        peer_selection_mode: "all" or "shift_one", which needs an even number of hosts or ranks; with one alone it
            averages inside the host, or does nothing.
        communication_interval: Forward passes from one exchange to the next. Passes under ``no_sync`` or
            ``torch.no_grad()`` neither count nor exchange.
        codec: How what crosses between hosts is encoded: a name, a ``Codec``, or None. Weights never are: differences
            to the last common mean are, and what a codec loses is sent later. Costs memory for the difference, and for
            a copy of the weights ("all"), or for one per partner on other hosts ("shift_one"). A name turns
            error feedback on; ``Codec(name)`` has its own default. Here pairs of hosts take the mean of both hosts'
            means, weighted by their ranks.
        everywhere: With a codec and ``hierarchical=False``: encode inside hosts, too.

    After ``with_bagua`` ``bucket._peer_weight`` is the mean of the last exchange, flat.
    """

    def __init__(
        self,
        hierarchical: bool = True,
        peer_selection_mode: str = "all",
        communication_interval: int = 1,
        codec: Codec | str | None = None,
        everywhere: bool = False,
    ) -> None:
        self.hierarchical = hierarchical
        self.peer_selection_mode = check_mode(peer_selection_mode)
        self.communication_interval = check_count("communication_interval", communication_interval, 1)
        self.codec = codec_of_differences(codec)
        self.everywhere = check_everywhere(everywhere, self.codec, hierarchical)

    def reify(self, process_group: ProcessGroup) -> DecentralizedAlgorithmImpl:
        """A new implementation for one model. Raises ValueError for ranks or hosts that can't be paired."""
        return DecentralizedAlgorithmImpl(
            process_group,
            hierarchical=self.hierarchical,
            peer_selection_mode=self.peer_selection_mode,
            communication_interval=self.communication_interval,
            codec=self.codec,
            everywhere=self.everywhere,
        )


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
        # The first rank of a host stands in the ring for all of it.
        self._in_ring = not self.hierarchical or any(me == host[0] for host in hosts)
        check_optimizers(bagua_ddp, "LowPrecisionDecentralizedAlgorithm")
        return super().init_tensors(bagua_ddp)

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Inside the host the mean, between hosts (or all ranks) the exchange with both neighbours."""
        bucket.add_slot(NOW, on_change=SCRATCH)
        take = Local(lambda one: copy_weights(one, NOW), "weights as they are", reads=(WEIGHT,), writes=(NOW,))
        give = Local(lambda one: set_weights(one, NOW), "weights as all know them", reads=(NOW,), writes=(WEIGHT,))
        inside: tuple[Step, ...] = (AllReduce("AVG", NOW, NOW, over=HOST),) if self.hierarchical else ()
        ring = self._ring(bucket) if self._units > 1 and self._in_ring else ()
        back: tuple[Step, ...] = (Broadcast(NOW, over=HOST),) if self.hierarchical and self._units > 1 else ()
        bucket.set_plan(Plan((take, *inside, *ring, *back, give)))
        if not ring:  # programs read the slots, also where there is no ring
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
        codec, lost = fits(bucket, self.codec), None
        if codec is not None and codec.error_feedback:
            bucket.add_slot(LOST, communicated=False)
            codec, lost = replace(codec, error_feedback=False), LOST  # done here
        messages = (DIFFERENCE, DIFFERENCE, FROM_LEFT, FROM_RIGHT)
        return ring_steps(NOW, REPLICAS, messages, codec, LEADERS if self.hierarchical else EVERYONE, lost)

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


def ring_steps(
    now: str,
    replicas: Sequence[str],
    messages: Sequence[str],
    codec: Codec | None,
    over: Over,
    lost: str | None = None,
    alone: bool = False,
) -> tuple[Step, ...]:
    """Steps of one exchange in a ring; ``LowPrecisionDecentralizedAlgorithm`` has the formula. Slots: ``now`` (x),
    ``replicas`` (W, L, R), ``messages`` (d, then what the own, the left and the right message decode to), ``lost``
    (what encoding has lost so far). ``alone``: this rank is its own neighbour."""
    own, left, right = replicas
    difference, decoded, from_left, from_right = messages
    # Alone: what it sends is what both neighbours send.
    arrived = (decoded, decoded, decoded) if alone else (decoded, from_left, from_right)
    kept = () if lost is None else (lost,)

    def differ(bucket: Bucket) -> None:
        found = bucket.slot(difference)
        found.copy_(bucket.slot(now))
        found.add_(bucket.slot(left), alpha=1 / 3).add_(bucket.slot(right), alpha=1 / 3)
        found.add_(bucket.slot(own), alpha=-5 / 3)
        for slot in kept:
            found.copy_(bucket.slot(slot).add_(found))  # added to what was lost before: both travel

    def follow(bucket: Bucket) -> None:
        for replica, message in zip(replicas, arrived, strict=True):
            bucket.slot(replica).add_(bucket.slot(message))
        bucket.slot(now).copy_(bucket.slot(own))
        for slot in kept:
            bucket.slot(slot).sub_(bucket.slot(decoded))

    return (
        Local(differ, "difference to the replica", (now, *replicas, *kept), (difference, *kept)),
        Neighbours(difference, decoded, from_left, from_right, codec=codec, over=over),
        Local(follow, "replicas follow", (*replicas, *arrived, *kept), (*replicas, now, *kept)),
    )


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
