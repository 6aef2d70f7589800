"""QAdam: Adam whose momentum is averaged encoded once its second moment is known."""

from __future__ import annotations

from typing import Any

import torch

from bagua.algorithms.base import REFUSES_MOMENTS, Algorithm, AlgorithmImpl, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import GRADIENT, SCRATCH, AllReduce, Local, Plan
from bagua.algorithms.q_adam_optimizer import QAdamOptimizer, mix, with_decay
from bagua.algorithms.registry import GlobalAlgorithmRegistry
from bagua.algorithms.weights import GIVE_IT

MOMENTUM = "momentum"


class QAdamAlgorithmImpl(AlgorithmImpl):
    """``QAdamAlgorithm`` at work on one model. ``optimizer`` is known when the model's optimizers are."""

    takes_sparse = False

    def __init__(
        self,
        process_group: ProcessGroup,
        q_adam_optimizer: QAdamOptimizer | None,
        hierarchical: bool = True,
        codec: Codec | str | None = "minmax8",
        scaled: bool = False,
    ) -> None:
        super().__init__(process_group)
        self.optimizer = q_adam_optimizer
        self.hierarchical = hierarchical
        self.codec = Codec.of(codec)
        self.scaled = scaled
        self._compresses = False
        self._groups: dict[torch.Tensor, dict[str, Any]] = {}

    @property
    def warmup_steps(self) -> int:
        """Number of steps with full gradients."""
        return 0 if self.optimizer is None else self.optimizer.warmup_steps

    @property
    def optimizer_step_id(self) -> int:
        """Steps that the optimizer has done."""
        return 0 if self.optimizer is None else self.optimizer.step_id

    @property
    def refuses_join(self) -> str | None:
        return REFUSES_MOMENTS

    def need_reset(self) -> bool:
        """True when the warm-up is over, and when a state from before its end has been loaded since."""
        return self.optimizer is not None and self.optimizer.warm != self._compresses

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Raises ValueError for optimizers that don't fit."""
        self.optimizer = find_optimizer(bagua_ddp, self.optimizer)
        self._groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        strange = [name for name, parameter in bagua_ddp.bagua_build_params() if parameter not in self._groups]
        if strange:
            raise ValueError(
                f"QAdam averages momentum, and the QAdamOptimizer does not hold {', '.join(strange[:3])}: give it all "
                "trainable parameters of the model, or set requires_grad=False. [BG305]"
            )
        self._compresses = self.optimizer.warm
        return super().init_tensors(bagua_ddp)

    def init_operations(self, bagua_ddp: DataParallel, bucket: Bucket) -> None:
        """The mean of gradients in the warm-up, that of momentum after it."""
        if not self._compresses:
            bucket.set_plan(Plan((AllReduce("AVG"),)))
            return
        bucket.add_slot(MOMENTUM, on_change=SCRATCH)
        everywhere = not self.hierarchical and self.codec is not None
        bucket.set_plan(
            Plan(
                (
                    Local(self._contribute, "momentum of this rank", reads=(GRADIENT,), writes=(MOMENTUM,)),
                    AllReduce("AVG", MOMENTUM, MOMENTUM, codec=self.codec, everywhere=everywhere),
                    Local(self._hand_over, "momentum for the optimizer", reads=(MOMENTUM,)),
                )
            )
        )

    def _contribute(self, bucket: Bucket) -> None:
        """MOMENTUM = β1 m + (1-β1) g, with m as it was after the optimizer's last step: several backward passes
        before the next one add up in g, and m is counted once. ``scaled``: divided by the next step's denominator."""
        assert self.optimizer is not None
        targets, gradients = bucket.views(MOMENTUM), bucket.views(GRADIENT)
        for group, numbers in self._by_group(bucket):
            parameters = [bucket.tensors[number] for number in numbers]
            mixed = [targets[number] for number in numbers]
            torch._foreach_copy_(mixed, [self.optimizer.state[parameter]["exp_avg"] for parameter in parameters])
            found = with_decay(group, parameters, [gradients[number] for number in numbers])
            mix(mixed, found, group["betas"][0])
            if self.scaled:
                torch._foreach_div_(mixed, self.optimizer.denominators(group, parameters, group["step_id"] + 1))

    def _by_group(self, bucket: Bucket) -> list[tuple[dict[str, Any], list[int]]]:
        """Numbers of the bucket's parameters, by the optimizer's groups of settings."""
        found: dict[int, tuple[dict[str, Any], list[int]]] = {}
        for number, parameter in enumerate(bucket.tensors):
            group = self._groups[parameter]
            found.setdefault(id(group), (group, []))[1].append(number)
        return list(found.values())

    def _hand_over(self, bucket: Bucket) -> None:
        assert self.optimizer is not None
        momenta = bucket.views(MOMENTUM)
        if self.scaled:
            for group, numbers in self._by_group(bucket):
                parameters = [bucket.tensors[number] for number in numbers]
                scales = self.optimizer.denominators(group, parameters, group["step_id"] + 1)
                for number, scale in zip(numbers, scales, strict=True):
                    momenta[number].mul_(scale.masked_fill_(scale == torch.inf, 0))  # such elements never move
        self.optimizer.averaged.update(zip(bucket.tensors, momenta, strict=True))

    def close(self) -> None:
        """Forgets what has not been applied."""
        if self.optimizer is not None:
            self.optimizer.averaged.clear()


def find_optimizer(bagua_ddp: DataParallel, wanted: QAdamOptimizer | None) -> QAdamOptimizer:
    """``wanted``, or the only QAdamOptimizer of the model. Raises ValueError where there is none."""
    held = list(bagua_ddp.bagua_optimizers)
    if wanted is not None:
        if not any(optimizer is wanted for optimizer in held):
            raise ValueError("QAdamAlgorithm got an optimizer that the model did not: pass both the same. [BG305]")
        return wanted
    found = [optimizer for optimizer in held if isinstance(optimizer, QAdamOptimizer)]
    if len(found) != 1:
        names = ", ".join(type(optimizer).__name__ for optimizer in held) or "none"
        raise ValueError(
            f"QAdam needs one QAdamOptimizer among the model's optimizers, and found {len(found)} (there: {names}). "
            f"Make one (bagua.torch_api.algorithms.q_adam), and {GIVE_IT}. [BG305]"
        )
    return found[0]


class QAdamAlgorithm(Algorithm):
    """Adam with momentum that travels in 8 bits, or in one: see ``QAdamOptimizer`` for the formula.

    In the warm-up all ranks apply the mean of full gradients: 2(h-1)/h · b bytes in and out of each of h hosts per
    step, for b bytes of gradients. After it buckets carry momentum through a codec, r times that: 1/4 · (1 + 1/64)
    for "minmax8" and 1/32 · (1 + 1/32) for "onebit", which feeds back what it loses (1-bit Adam; the figures published
    for the original's QAdam are of this form, its open code has 8 bits alone). Choose it for models that need Adam, on
    networks that limit them. Replicas stay bit-identical.

    When the warm-up ends, buckets are made anew, and parameters become rank 0's once more. From then on ``.grad`` is
    this rank's own after backward, so that clipping or unscaling it there changes nothing: momentum has been sent. A
    parameter without a gradient on any rank counts as one with a gradient of zero.

    Args:
        q_adam_optimizer: The ``QAdamOptimizer`` that with_bagua gets, too. None: it is found there.
        hierarchical: Momentum is encoded between hosts alone. False: that of every rank, and the mean, wherever ranks
            are. It has no meaning in the warm-up.
        codec: A name, a ``Codec`` or None: "minmax8" as in the original, "onebit", any other.
        scaled: Momentum is divided by its denominator before it is encoded, and multiplied with it afterwards: with
            D = √v / √(1-β2^k) + eps, m = D · mean over ranks of C((β1 m + (1-β1) g) / D). Elements that share a block
            of the message then have the same size, and the codec's error the size of a step wherever v is small. Take
            it with "onebit"; False is the original's rule.

    Raises TypeError for an optimizer of another class; ``with_bagua`` raises ValueError if none fits.
    """

    def __init__(
        self,
        q_adam_optimizer: QAdamOptimizer | None = None,
        hierarchical: bool = True,
        codec: Codec | str | None = "minmax8",
        scaled: bool = False,
    ) -> None:
        if q_adam_optimizer is not None and not isinstance(q_adam_optimizer, QAdamOptimizer):
            raise TypeError(
                f"q_adam_optimizer is a {type(q_adam_optimizer).__name__}: pass a QAdamOptimizer, or None. [BG305]"
            )
        self.q_adam_optimizer = q_adam_optimizer
        self.hierarchical = hierarchical
        self.codec = Codec.of(codec)
        self.scaled = scaled

    @property
    def optimizer(self) -> QAdamOptimizer | None:
        return self.q_adam_optimizer

    def reify(self, process_group: ProcessGroup) -> QAdamAlgorithmImpl:
        return QAdamAlgorithmImpl(process_group, self.q_adam_optimizer, self.hierarchical, self.codec, self.scaled)


GlobalAlgorithmRegistry.register("qadam", QAdamAlgorithm, "Adam whose momentum travels in 8 bits, or in one")
