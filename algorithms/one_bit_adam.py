"""1-bit Adam: Adam whose variance freezes after a warm-up, so that momentum can travel in one bit per element."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from bagua.algorithms.base import REFUSES_MOMENTS, Algorithm, AlgorithmImpl, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_count
from bagua.algorithms.codec import Codec
from bagua.algorithms.frozen_adam import FrozenAdam
from bagua.algorithms.plan import GRADIENT, RESULT, SCRATCH, AllReduce, Local, Plan
from bagua.algorithms.weights import check_optimizers, find_optimizer, wholes

MOMENTUM = "momentum"  # Slot: this rank's scaled momentum


class OneBitAdamOptimizer(FrozenAdam):
    """The optimizer of ``OneBitAdamAlgorithm``: Adam for ``warmup_steps`` steps, then with frozen variance.

    Args:
        warmup_steps: At least 1. A quarter of the training is safe; after it the learning rate may fall, but should not
            rise much.
        lr, betas, eps, weight_decay: As in torch's AdamW (weight decay is decoupled).
        floor: Frozen denominators are at least this share of their parameter's root mean square.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.1,
    ) -> None:
        self.warmup_steps = check_count("warmup_steps", warmup_steps, 1)
        super().__init__(params, lr, betas, eps, weight_decay, floor)

    def freezes_after(self) -> int:
        return self.warmup_steps

    def frozen_step(self, group: dict[str, Any]) -> None:
        """``.grad`` is the ranks' mean scaled momentum u, and x = x - η u / (1-β1^k)."""
        parameters, results, momenta, _ = self.lists(group)
        group["steps"] += 1
        if not parameters:
            return
        torch._foreach_copy_(momenta, results)
        self.decay(group, parameters)
        torch._foreach_add_(parameters, results, alpha=-group["lr"] / (1 - group["betas"][0] ** group["steps"]))


class OneBitAdamAlgorithmImpl(AlgorithmImpl):
    takes_sparse = False
    refuses_join = REFUSES_MOMENTS

    def __init__(
        self, process_group: ProcessGroup, optimizer: OneBitAdamOptimizer | None, codec: Codec | None, everywhere: bool
    ) -> None:
        super().__init__(process_group)
        self._given = optimizer
        self.codec = codec
        self.everywhere = everywhere
        self._frozen = False

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Finds the optimizer, too. Raises ValueError without it, or if it lacks parameters."""
        self.optimizer = find_optimizer(bagua_ddp, OneBitAdamOptimizer, self._given, alone=True)
        check_optimizers(bagua_ddp, "OneBitAdamAlgorithm")
        self._frozen = self.optimizer.frozen
        return super().init_tensors(bagua_ddp)

    def need_reset(self) -> bool:
        """True once the optimizer's variance has frozen."""
        return self.optimizer.frozen != self._frozen  # gradients make room for momentum: buckets get other plans

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """Mean gradients; after the warm-up mean momentum in one bit."""
        if not self._frozen:
            bucket.set_plan(Plan((AllReduce("AVG"),)))
            return
        bucket.add_slot(MOMENTUM, on_change=SCRATCH)
        fold = Local(functools.partial(self._fold, wholes(bucket)), "momentum", reads=(GRADIENT,), writes=(MOMENTUM,))
        average = AllReduce("AVG", src=MOMENTUM, dst=RESULT, codec=self.codec, everywhere=self.everywhere)
        bucket.set_plan(Plan((fold, average)))

    def _fold(self, parameters: list[torch.Tensor], bucket: Bucket) -> None:
        """MOMENTUM = β1 u + (1-β1) s g, with the gradient of this rank."""
        with torch.no_grad():
            groups = self.optimizer.groups_by_parameter()  # asked each time: a state that is loaded makes new groups
            parts = zip(parameters, bucket.views(GRADIENT), bucket.views(MOMENTUM), strict=True)
            for parameter, gradient, folded in parts:
                momentum, scale = self.optimizer.moments(parameter)
                beta = groups[parameter]["betas"][0]
                torch.mul(momentum, beta, out=folded)
                folded.addcmul_(gradient, scale, value=1 - beta)


class OneBitAdamAlgorithm(Algorithm):
    """Adam, then Adam with frozen variance whose momentum travels in one bit per element.

    Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed", 2021. After
    the warm-up, with D the frozen denominator of each element, g_i rank i's gradient, and u the last mean:

        u_i = β1 u + (1-β1) g_i / D;   u = mean(onebit(u_i + e_i));   e_i = what encoding lost;   x = x - η u / (1-β1^k)

    u is the paper's momentum divided by D before it is encoded, not after: in one block of 1024 elements, which share
    one magnitude in the message, m may differ by orders of magnitude, u does not. Elements with small gradients, which
    have a small D, would get the others' noise, divided by that. The mean is encoded, too, and its error fed back.

    In the warm-up a step moves 2(h-1)/h · b bytes in and out of each of h hosts, for b bytes of gradients; after it a
    32nd of that. Momentum needs no memory of its own.

    Choose it for training with Adam over slow links, when the learning rate has a plan that stays level or falls after
    the warm-up. ``.grad`` then shows mean scaled momentum: don't clip it, and use no GradScaler (bfloat16 needs none).

    Args:
        optimizer: The ``OneBitAdamOptimizer`` that steps the model; None: that among with_bagua's optimizers.
        codec: Of momentum between hosts: "onebit", or a finer one such as "int4"; None: float32.
        everywhere: Ranks of one host exchange encoded momentum, too.
    """

    def __init__(
        self,
        optimizer: OneBitAdamOptimizer | None = None,
        codec: Codec | str | None = "onebit",
        everywhere: bool = False,
    ) -> None:
        self.optimizer = optimizer
        self.codec = Codec.of(codec)
        self.everywhere = everywhere

    def reify(self, process_group: ProcessGroup) -> OneBitAdamAlgorithmImpl:
        return OneBitAdamAlgorithmImpl(process_group, self.optimizer, self.codec, self.everywhere)
