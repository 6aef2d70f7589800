"""Asynchronous model average: weights are averaged in the background while every rank trains at its own speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bagua.algorithms.averaging import PEER, SNAPSHOT, mean_of_all, mean_of_pair
from bagua.algorithms.base import (
    REFUSES_WEIGHTS,
    Algorithm,
    AlgorithmImpl,
    Bucket,
    BucketLayout,
    Communicator,
    DataParallel,
    ProcessGroup,
    no_hook,
)
from bagua.algorithms.checks import check_count, check_everywhere, check_mode
from bagua.algorithms.codec import Codec
from bagua.algorithms.pairs import Pairs
from bagua.algorithms.plan import GRADIENT, WEIGHT, Local, Plan
from bagua.algorithms.warm_up import WarmUp
from bagua.algorithms.weights import codec_of_differences, one_bucket_per_dtype, where_needed


class AsyncModelAverageAlgorithmImpl(AlgorithmImpl):
    """``AsyncModelAverageAlgorithm``, which explains the arguments, at work on one model.

    ``passes``: forward passes in training so far. ``begun``: averages that this rank has begun; ranks that go on
    differ by one at most. ``rounds``: those that it has applied. ``averaging``: False after ``abort``. Each bucket has
    communicators of its own.
    """

    follows_arrival = False
    waits = False
    takes_shards = False  # each rank takes an average up at a moment of its own: shards would be of different steps
    refuses_join = REFUSES_WEIGHTS
    newcomers_take = ("passes", "begun", "rounds", "exchanged")

    def __init__(
        self,
        process_group: ProcessGroup,
        peer_selection_mode: str = "all",
        sync_interval_ms: int = 500,
        warmup_steps: int = 0,
        codec: Codec | str | None = None,
        everywhere: bool = False,
        warmup_codec: Codec | str | None = None,
    ) -> None:
        super().__init__(process_group)
        self.peer_selection_mode = check_mode(peer_selection_mode)
        self.sync_interval_ms = check_count("sync_interval_ms", sync_interval_ms, 0)
        self.warm_up = WarmUp.of(warmup_steps, warmup_codec)
        self.warmup_steps = self.warm_up.steps
        self._wanted_codec = codec_of_differences(codec)
        self.codec = where_needed(self._wanted_codec, everywhere, process_group)
        self.everywhere = everywhere and self.codec is not None
        self.exchanged = GRADIENT if self.warm_up.steps > 0 else WEIGHT
        self.passes = 0
        self.begun = 0
        self.rounds = 0
        self.averaging = True
        self._under_way = False
        self._model: DataParallel | None = None
        self._next_start = 0.0  # by time.monotonic()
        self._pairs: dict[str, Pairs] = {}  # by bucket
        if self.peer_selection_mode == "shift_one":  # at once, and not when the warm-up is over
            Pairs(process_group, hierarchical=False)  # raises if ranks can't be paired

    def need_reset(self) -> bool:
        """True once, in the first forward pass after the warm-up: weights take the place of gradients."""
        self.passes += 1
        if self.exchanged == WEIGHT or self.passes <= self.warm_up.steps:
            return False
        self.exchanged = WEIGHT
        return True

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BucketLayout]:
        """Makes one bucket of weights, or one for each dtype. Buckets of gradients stay as suggested."""
        if self.exchanged == GRADIENT:
            return super().tensors_to_buckets(tensors, do_flatten)
        return one_bucket_per_dtype(tensors)

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """The mean of gradients in the warm-up; then that of snapshots of the weights."""
        if self.exchanged == GRADIENT:
            bucket.set_plan(self.warm_up.plan())
            return
        # A communicator for them alone: averages come at other moments than gradients.
        own = bagua_ddp.own_communicator()
        self._model = bagua_ddp
        if self.peer_selection_mode == "shift_one":
            # One step that communicates, never two: the second one would be waited for.
            # The name is the model's: ranks may begin exchanges of two models in different orders.
            name = f"averages beside {own.id}"
            pairs = self._pairs[bucket.name] = Pairs(self.process_group, hierarchical=False, private=name, rests=True)
            steps = mean_of_pair(bucket, pairs, self.codec, everywhere=True, keep_snapshot=True)
        else:
            steps = mean_of_all(bucket, self.codec, self.everywhere, lambda: own, keep_snapshot=True)
        apply = Local(_apply, "add the mean's difference", reads=(PEER, SNAPSHOT, WEIGHT), writes=(WEIGHT,))
        bucket.set_plan(Plan((*steps, apply)))

    def communicators(self) -> Iterator[Communicator]:
        """Yields the communicators of the pairs of units."""
        for pairs in self._pairs.values():
            yield from pairs.of_all_rounds()

    def tell_newcomers(self) -> dict[str, Any]:
        """Returns the encoding, which was settled when the model was wrapped, and when the next average begins."""
        # Clocks of two hosts have no common zero: what is left is told.
        rest = max(0.0, self._next_start - time.monotonic())
        return {**super().tell_newcomers(), "encodes": self.codec is not None, "begins_in_s": rest}

    def hear_as_newcomer(self, told: dict[str, Any]) -> None:
        """Encodes, and begins, as the others do."""
        super().hear_as_newcomer(told)
        self._next_start = time.monotonic() + told["begins_in_s"]
        self.codec = self._wanted_codec if told["encodes"] else None

    def follow_members(self, bagua_ddp: DataParallel) -> bool:
        """True while gradients are exchanged. Later all ranks begin anew with rank 0's weights, because some have
        applied an average and others have not.
        """
        self._under_way = False
        return self.exchanged == GRADIENT

    def init_forward_pre_hook(self, bagua_ddp: DataParallel) -> Callable[[Any], None]:
        """Applies the average that has arrived, and starts the next one when it is time."""
        return lambda _: self._look(bagua_ddp) if self.averaging and self.exchanged == WEIGHT else None

    def init_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[str, torch.nn.Parameter], None]:
        """Gradients are exchanged in the warm-up alone."""
        return super().init_backward_hook(bagua_ddp) if self.exchanged == GRADIENT else no_hook

    def init_post_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[], None]:
        """Returns a function that waits in the warm-up, and does nothing later."""
        return super().init_post_backward_hook(bagua_ddp) if self.exchanged == GRADIENT else no_hook

    def _look(self, bagua_ddp: DataParallel) -> None:
        """Looks after the exchange at the beginning of a forward pass. It never waits for another rank."""
        if self._under_way:
            if not all(bucket.done() for bucket in bagua_ddp.bagua_buckets):
                return
            self._finish(bagua_ddp)
        if time.monotonic() >= self._next_start:
            self._under_way = True
            self.begun += 1
            for bucket in bagua_ddp.bagua_buckets:
                bucket.start()

    def _finish(self, bagua_ddp: DataParallel) -> None:
        for bucket in bagua_ddp.bagua_buckets:
            bucket.join()
        self._under_way = False
        self.rounds += 1
        self._next_start = time.monotonic() + self.sync_interval_ms / 1000

    def abort(self, bagua_ddp: Any = None) -> None:
        """Ends averaging, with the same weights on all ranks. All ranks call it after their last step.

        A rank that comes early takes part in the averages of the others until all are there; then all get the mean of
        their weights. In the warm-up, when replicas are equal, it waits for nobody; nothing if it was called before.
        ``bagua_ddp``: the model, its wrapper or ``bagua_ddp``, as in the original; this object knows its model anyway.
        Raises CommunicationError if a rank leaves the job instead.
        """
        model, was_averaging, self.averaging = self._model, self.averaging, False
        if model is not None and was_averaging:
            model.settle(lambda: self._look(model), lambda: self._finish(model) if self._under_way else None)

    def close(self) -> None:
        """Lets go of the model."""
        self._model = None

    def resume(self, bagua_ddp: Any = None) -> None:
        """Takes part again from the next forward pass on. Waits for nobody: the others' next average waits for this
        rank, while they train on. Nothing if not aborted."""
        self.averaging = True


def _apply(bucket: Bucket) -> None:
    """x += mean - snapshot: what this rank has learned since the snapshot stays."""
    weights = list(bucket.views(WEIGHT))
    torch._foreach_add_(weights, list(bucket.views(PEER)))
    torch._foreach_sub_(weights, list(bucket.views(SNAPSHOT)))


class AsyncModelAverageAlgorithm(Algorithm):
    """Each rank applies its own gradients at its own speed, and every now and then x += mean(s) - s.

    s is a snapshot of the weights x, which travels while training goes on; what a rank has learned since is kept. No
    step waits for another rank: a forward pass that finds the mean complete applies it, and one that comes
    ``sync_interval_ms`` after that takes the next snapshot. So the ranks' averages are as frequent as the slowest rank
    allows, and their steps as fast as each of them can. In the first ``warmup_steps`` forward passes gradients are
    averaged instead, with every step waiting, so that ranks begin on common ground. Bagua's "async"; compare Zhang et
    al., "Deep learning with Elastic Averaging SGD", NeurIPS 2015.

    In a step nothing is sent; an exchange moves 2(h-1)/h · b bytes in and out of each of h hosts for b bytes of weights
    ("shift_one": b in and out of each rank with its peer on another host), once per interval at most. Choose it where
    ranks are of different or changing speed. Replicas differ: evaluate any of them, or their mean.

    Args:
        peer_selection_mode: "all": the mean over all ranks. "shift_one": over two, which change (see
            ``DecentralizedAlgorithm``); it needs an even number of ranks, and a slow rank then delays its peers alone.
        sync_interval_ms: From the moment an average was applied to the next snapshot. 0: at once.
        warmup_steps: Forward passes in training with gradient all-reduce.
        codec: How what crosses between hosts is encoded: a name, a ``Codec``, or None. Differences to the last common
            mean are, never weights; see ``DecentralizedAlgorithm``.
        everywhere: With a codec: encode inside hosts, too. "shift_one" always does so, if there are several hosts.
        warmup_codec: How gradients are encoded between hosts in the warm-up; None: as they are.

    After training all ranks call ``model.bagua_algorithm.abort(model)``: it waits for all, and leaves the same weights
    on all; ``.resume(model)`` goes on. A rank that ends without it leaves the others without averages and without an
    error. It waits for them when it wraps the model anew, calls ``model.bagua_ddp.close()`` or
    ``destroy_process_group()``, or its process ends.
    """

    def __init__(
        self,
        peer_selection_mode: str = "all",
        sync_interval_ms: int = 500,
        warmup_steps: int = 0,
        codec: Codec | str | None = None,
        everywhere: bool = False,
        warmup_codec: Codec | str | None = None,
    ) -> None:
        self.peer_selection_mode = check_mode(peer_selection_mode)
        self.sync_interval_ms = check_count("sync_interval_ms", sync_interval_ms, 0)
        self.warm_up = WarmUp.of(warmup_steps, warmup_codec)
        self.warmup_steps = self.warm_up.steps
        self.codec = codec_of_differences(codec)
        self.everywhere = check_everywhere(everywhere, self.codec)

    def reify(self, process_group: ProcessGroup) -> AsyncModelAverageAlgorithmImpl:
        """A new implementation for one model. Raises ValueError for ranks that can't be paired."""
        return AsyncModelAverageAlgorithmImpl(
            process_group,
            peer_selection_mode=self.peer_selection_mode,
            sync_interval_ms=self.sync_interval_ms,
            warmup_steps=self.warmup_steps,
            codec=self.codec,
            everywhere=self.everywhere,
            warmup_codec=self.warm_up.codec,
        )
