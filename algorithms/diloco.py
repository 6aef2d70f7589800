"""DiLoCo: many local steps, then one outer step with Nesterov momentum; and its streaming form."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from bagua.algorithms.base import Algorithm, Bucket, BucketLayout, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_count, check_positive, check_share
from bagua.algorithms.codec import Codec
from bagua.algorithms.periodic import ANCHOR, DELTA, PeriodicImpl, plan_differences
from bagua.algorithms.plan import COPY, WEIGHT
from bagua.algorithms.warm_up import WarmUp
from bagua.algorithms.weights import codec_of_differences, set_weights, whole

VELOCITY = "velocity"


class DiLoCoAlgorithmImpl(PeriodicImpl):
    def __init__(self, process_group: ProcessGroup, settings: DiLoCoAlgorithm) -> None:
        super().__init__(process_group, settings.interval, settings.warm_up)
        self.settings = settings

    def plan_weights(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Pseudo-gradients, their mean, and the outer step."""
        bucket.add_slot(VELOCITY, communicated=False, on_change=COPY)
        plan_differences(bucket, self.settings.codec, self.merge)

    def merge(self, bucket: Bucket) -> None:
        """The outer step; weights become the anchor."""
        self.outer_step(bucket)
        set_weights(bucket, ANCHOR)

    def outer_step(self, bucket: Bucket) -> None:
        """Nesterov's step of the anchor along the mean pseudo-gradient."""
        anchor, delta, velocity = bucket.slot(ANCHOR), bucket.slot(DELTA), bucket.slot(VELOCITY)
        lr, momentum = self.settings.outer_lr, self.settings.outer_momentum
        velocity.mul_(momentum).add_(delta)
        # Nesterov: the step goes on by the velocity that it has just got.
        anchor.add_(delta, alpha=-lr).add_(velocity, alpha=-lr * momentum)


class DiLoCoAlgorithm(Algorithm):
    """H local steps of the inner optimizer, then one step of an outer one on the mean of what ranks have moved.

    Douillard et al., "DiLoCo: distributed low-communication training of language models", 2023. With y the anchor,
    the weights after the last outer step, and x_i rank i's weights H steps later:

        Δ = (1/n) · Σ (y - x_i);   v = μ v + Δ;   y = y - η (Δ + μ v);   x_i = y

    Per outer step 2(h-1)/h · r · b bytes go in and out of each of h hosts, for b bytes of weights: 1/H of that per
    step; r is the codec's share (1/4 for "minmax8", 1/8 for "int4", whose error is fed back). Each rank keeps anchor,
    velocity and difference: three times the weights. The inner optimizer's state stays each rank's own.

    Choose it for training over slow links (H from tens to hundreds); on links where gradients can be sent, it costs
    samples. The inner optimizer is AdamW, or Muon for matrices and AdamW for the rest (Thérien et al., "MuLoCo: Muon is
    a practical inner optimizer for DiLoCo", 2025), which on charlm keeps its lead over AdamW with codec="int2".

    Args:
        interval: H.
        outer_lr: η.
        outer_momentum: μ.
        warmup_steps: Optimizer steps with gradient all-reduce before the first local one. A tenth of the training is
            a good choice where it begins from random weights.
        codec: How float32 pseudo-gradients are encoded between hosts; None: as they are.
        warmup_codec: How gradients are encoded between hosts in the warm-up; None: as they are.
    """

    def __init__(
        self,
        interval: int = 16,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup_steps: int = 0,
        codec: Codec | str | None = None,
        warmup_codec: Codec | str | None = None,
    ) -> None:
        self.interval = check_count("interval", interval, 1)
        self.outer_lr = check_positive("outer_lr", outer_lr)
        self.outer_momentum = check_share("outer_momentum", outer_momentum)
        self.warm_up = WarmUp.of(warmup_steps, warmup_codec)
        self.codec = codec_of_differences(codec)

    def reify(self, process_group: ProcessGroup) -> DiLoCoAlgorithmImpl:
        return DiLoCoAlgorithmImpl(process_group, self)


class StreamingDiLoCoAlgorithmImpl(DiLoCoAlgorithmImpl):
    """``StreamingDiLoCoAlgorithm`` at work on one model. ``_under_way``: fragments that were sent and have not been
    taken up. ``_sent_by_others``: those that this rank has not sent, because it joined the others later."""

    settings: StreamingDiLoCoAlgorithm
    recuts = False  # fragments travel at different moments

    def __init__(self, process_group: ProcessGroup, settings: StreamingDiLoCoAlgorithm) -> None:
        super().__init__(process_group, settings)
        self._modules: dict[int, str] = {}
        self._under_way: list[int] = []
        self._sent_by_others: list[int] = []

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Notes which parameters belong to one module, too. After a reset nothing is under way but, on a rank that
        joins, what the others have sent."""
        self._ddp = bagua_ddp
        self._under_way = list(self._sent_by_others)
        self._modules = {id(parameter): name.rpartition(".")[0] for name, parameter in bagua_ddp.bagua_build_params()}
        return super().init_tensors(bagua_ddp)

    def tensors_to_buckets(self, tensors: Sequence[Sequence[torch.Tensor]], do_flatten: bool) -> list[BucketLayout]:
        """Buckets of weights, each of one fragment: named ``fragment.number``."""
        if self.exchanged != WEIGHT:
            return super().tensors_to_buckets(tensors, do_flatten)
        fragment_of = self._share_out([tensor for group in tensors for tensor in group])
        layouts: list[BucketLayout] = []
        for fragment in range(self.settings.fragments):
            for group in tensors:
                mine = tuple(tensor for tensor in group if fragment_of[id(tensor)] == fragment)
                if mine:
                    layouts.append(BucketLayout(f"{fragment}.{len(layouts)}", mine))
        return layouts

    def _share_out(self, tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """The fragment of each tensor. Modules stay whole; each goes to the fragment that is smallest so far."""
        sizes = [0] * self.settings.fragments
        fragment_of: dict[int, int] = {}
        of_module: dict[str, int] = {}
        for tensor in tensors:
            module = self._modules[id(tensor)]
            if module not in of_module:
                of_module[module] = sizes.index(min(sizes))  # the smallest so far: fragments take equally long
            fragment_of[id(tensor)] = of_module[module]
            # A shard counts with the size of its whole parameter, so all shards of a module go together.
            sizes[of_module[module]] += whole(tensor).numel() * tensor.element_size()
        return fragment_of

    def merge(self, bucket: Bucket) -> None:
        """The outer step; weights move toward the anchor by the share that is not their own."""
        self.outer_step(bucket)
        weights, anchor = list(bucket.views(WEIGHT)), list(bucket.views(ANCHOR))
        torch._foreach_lerp_(weights, anchor, 1.0 - self.settings.mixing)

    def after_step(self, bagua_ddp: DataParallel, step: int) -> None:
        """Takes up the fragments that were sent ``overlap`` steps ago, and sends those whose turn it is."""
        with torch.no_grad():
            if self.settings.overlap:
                self._take_up(self._sent_at(step - self.settings.overlap))
            sent = self._sent_at(step)
            for bucket in self._buckets_of(sent):
                bucket.start()
            self._under_way += sent
            if self.settings.overlap == 0:
                self._take_up(sent)

    def _take_up(self, fragments: Sequence[int]) -> None:
        due = [one for one in fragments if one in self._under_way]  # nothing where it was not sent, as after a reset
        if not due:
            return
        for bucket in self._buckets_of([one for one in due if one in self._sent_by_others]):
            bucket.start()  # the others send it again now: members have changed
        self._under_way = [one for one in self._under_way if one not in due]
        self._sent_by_others = [one for one in self._sent_by_others if one not in due]
        self._ddp.join(self._buckets_of(due))

    def _sent_at(self, step: int) -> list[int]:
        """Fragments that are sent after this step."""
        return [fragment for fragment in range(self.settings.fragments) if self.sent_at(fragment, step)]

    def _buckets_of(self, fragments: Sequence[int]) -> list[Bucket]:
        return [one for one in self._ddp.bagua_buckets if int(one.name.partition(".")[0]) in fragments]

    def tell_newcomers(self) -> dict[str, Any]:
        """Adds the fragments that are under way."""
        return {**super().tell_newcomers(), "under_way": self._under_way}

    def hear_as_newcomer(self, told: dict[str, Any]) -> None:
        """Takes up with the others what they have sent: all take it anew then, from the weights of that moment."""
        super().hear_as_newcomer(told)
        self._sent_by_others = list(told["under_way"])

    def close(self) -> None:
        """Takes up what is under way: all ranks have sent it, or are about to, and would find this one gone."""
        with torch.no_grad(), suppress(RuntimeError):  # an operation that failed has been told, or will be
            self._take_up(list(self._under_way))

    def sent_at(self, fragment: int, step: int) -> bool:
        """True if the fragment is sent after this step. Fragment k of P is first sent after (k + 1) H / P steps."""
        first = (fragment + 1) * self.interval // self.settings.fragments
        return step >= first and (step - first) % self.interval == 0


class StreamingDiLoCoAlgorithm(DiLoCoAlgorithm):
    """DiLoCo in P fragments of the model that take turns, each sent while training goes on.

    Douillard et al., "Streaming DiLoCo with overlapping communication", 2025. Fragment k is sent every H steps, H/P
    steps after fragment k-1. Its pseudo-gradient is taken at step t; at step t + τ the outer step (see
    ``DiLoCoAlgorithm``) moves the anchor y, and the weights, which have gone on, are mixed with it:

        x_i = α x_i + (1-α) y

    Per step r · 2(h-1)/h · b/H bytes go in and out of each of h hosts, as in DiLoCo, but the peak is that of one
    fragment, 1/P, and it has τ steps to arrive: nothing waits as long as the network needs less. Encoding in 4 bits,
    the default, loses nothing that shows: what it lost is in the next pseudo-gradient.

    Choose it like DiLoCo, where a whole model takes long to send. A module's parameters stay in one fragment; fragments
    are filled evenly.

    Args:
        interval: H.
        fragments: P, at most H.
        overlap: τ, in steps, below H; 0 waits for the fragment at once.
        mixing: α: the share of a rank's own weights when a fragment arrives; 0: the anchor replaces them. On charlm
            0.15 and 0.25 were better than more and less.
        outer_lr, outer_momentum, warmup_steps, warmup_codec: As for ``DiLoCoAlgorithm``.
        codec: "int4", "minmax8", "int2" (with Muon: docs/accuracy.md), or None for float32.
    """

    def __init__(
        self,
        interval: int = 16,
        fragments: int = 4,
        overlap: int = 1,
        mixing: float = 0.5,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        warmup_steps: int = 0,
        codec: Codec | str | None = "int4",
        warmup_codec: Codec | str | None = None,
    ) -> None:
        super().__init__(interval, outer_lr, outer_momentum, warmup_steps, codec, warmup_codec)
        self.fragments = check_count("fragments", fragments, 1)
        self.overlap = check_count("overlap", overlap, 0)
        self.mixing = check_share("mixing", mixing)
        if fragments > interval:
            raise ValueError(
                f"{fragments} fragments can't take turns in {interval} steps: choose fragments <= interval. [BG302]"
            )
        if overlap >= interval:
            raise ValueError(
                f"overlap is {overlap}: a fragment must arrive before its next turn, {interval} steps on. [BG302]"
            )

    def reify(self, process_group: ProcessGroup) -> StreamingDiLoCoAlgorithmImpl:
        return StreamingDiLoCoAlgorithmImpl(process_group, self)
