"""Decentralised SGD: ranks average weights, all of them or in pairs, while they compute gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagua.algorithms.averaging import PEER, mean_of_all, mean_of_pair
from bagua.algorithms.base import Algorithm, AlgorithmImpl, Bucket, BucketLayout, DataParallel, ProcessGroup, no_hook
from bagua.algorithms.checks import check_count, check_mode
from bagua.algorithms.codec import Codec
from bagua.algorithms.pairs import Pairs
from bagua.algorithms.plan import WEIGHT, Local, Plan
from bagua.algorithms.registry import GlobalAlgorithmRegistry
from bagua.algorithms.weights import codec_of_differences, expose, one_bucket_per_dtype, set_weights, where_needed


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
        self._wanted_codec = codec_of_differences(codec)
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

        def replace(bucket: Bucket) -> None:
            set_weights(bucket, PEER)

        bucket.set_plan(Plan((*steps, Local(replace, "weights become the mean", reads=(PEER,), writes=(WEIGHT,)))))
        expose(bucket, _peer_weight=bucket.slot(PEER))

    def follow_members(self, bagua_ddp: DataParallel) -> bool:
        """Pairs are formed again. With a codec they have agreed on references that others don't know: all begin anew
        with rank 0's weights."""
        if self._pairs is None:
            return True
        self._pairs.form()
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


def check_everywhere(everywhere: bool, codec: Codec | None, hierarchical: bool) -> bool:
    """``everywhere``. Raises ValueError where it contradicts the rest."""
    if everywhere and codec is None:
        raise ValueError("everywhere=True needs a codec: without one nothing is encoded anywhere. [BG303]")
    if everywhere and hierarchical:
        raise ValueError(
            "everywhere=True encodes between all ranks, and hierarchical=True averages inside a host as it is: pass "
            "hierarchical=False with it. [BG304]"
        )
    return everywhere


GlobalAlgorithmRegistry.register(
    "decentralized", DecentralizedAlgorithm, "mean of all ranks' weights, or of changing pairs, beside computing"
)
