"""QAdam: Adam that averages its momentum in encoded form, after a warm-up in which its second moment is found."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from bagua.algorithms.base import REFUSES_MOMENTS, Algorithm, AlgorithmImpl, Bucket, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_adam
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import GRADIENT, SCRATCH, AllReduce, Local, Plan
from bagua.algorithms.weights import find_optimizer, part, whole, wholes

MOMENTUM = "momentum"


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam whose second moment v stops changing after a warm-up, so that momentum m can be averaged over ranks encoded.

    With k the number of the step, from 1, g the gradient plus ``weight_decay`` · x:

        k <= warmup_steps:  m = β1 m + (1-β1) g;   v = β2 v + (1-β2) g²
        afterwards:         m = mean over ranks of C(β1 m + (1-β1) g);   v stays
        always:             x -= lr / (1-β1^k) · m / (√v / √(1-β2^k) + eps)

    ``QAdamAlgorithm`` gives the mean; without it this rank's own m takes its place. Tang et al., "1-bit Adam:
    Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021.

    Three things are other than in the original: the gradient of step ``warmup_steps`` is used (there it is lost),
    weight decay stays after the warm-up, and elements that had no gradient in the warm-up (v is 0: rows of an
    embedding that no batch had) stay as they are after it, where the original divides by eps and throws them far off:
    ``exp_avg_sq`` is infinite for them then. As √(1-β2^k) goes on growing, steps get longer by up to
    1/√(1-β2^warmup_steps) after the warm-up. A warm-up of 1/(1-β2) steps or more keeps that small; or lower β2, or the
    learning rate.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate. betas: β1 and β2. weight_decay: L2 penalty.
        eps: Added to the denominator. After the warm-up it also bounds what a codec's error becomes where v is small.
        warmup_steps: Steps with full gradients, at least 1.
        floor: When the warm-up ends, √v of every element becomes at least this share of its root mean square over the
            parameter; 0: it stays as it is. An element that has hardly had a gradient until then would fly off with its
            first gradient, or with the codec's error from other elements of its block. 0.1 is a good choice, and leaves
            eps to rounding.

    Raises ValueError for values that can't be, RuntimeError (in ``step``) for sparse gradients.
    """

    sharded = False  # True: ranks hold parts of its parameters
    per_parameter = ("averaged",)  # for fuse_optimizer: a tensor for each parameter, beside the state

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        floor: float = 0.0,
    ) -> None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
            raise ValueError(f"warmup_steps is {warmup_steps!r}: it must be a whole number, at least 1. [BG302]")
        check_adam(betas, lr=lr, eps=eps, weight_decay=weight_decay, floor=floor)
        self.averaged: dict[Tensor, Tensor] = {}
        defaults = {
            "lr": lr,
            "warmup_steps": warmup_steps,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "floor": floor,
            "step_id": 0,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group that has taken as many steps as the first. Its second moments never warm up if that is over."""
        if self.param_groups:
            param_group = {**param_group, "step_id": self.step_id, "warmup_steps": self.warmup_steps}
        super().add_param_group(param_group)
        self.sharded = any(part(one) is not one for group in self.param_groups for one in group["params"])
        for parameter in self.param_groups[-1]["params"]:
            # Made at once: momentum is sent before the optimizer's next step.
            self.state[parameter] = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.averaged = {}  # means are of one step: a copy has none
        for group in self.param_groups:
            group.setdefault("floor", 0.0)  # a state from before there was one

    @property
    def step_id(self) -> int:
        """Number of steps taken so far."""
        return int(self.param_groups[0]["step_id"])

    @property
    def warmup_steps(self) -> int:
        """Steps in which the second moment changes."""
        return int(self.param_groups[0]["warmup_steps"])

    @property
    def warm(self) -> bool:
        """True once the warm-up is over."""
        return self.step_id >= self.warmup_steps

    @property
    def elementwise(self) -> bool:
        """True if the next step treats each element by itself, as ``fuse_optimizer`` asks. A floor that follows from
        all of a parameter makes it False.
        """
        # The last step of the warm-up takes the mean over a parameter.
        return self.step_id + 1 != self.warmup_steps or not any(group["floor"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes one step. ``closure``, if there is one, computes the loss once more; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        warm = self.warm  # asked before groups count this step
        for group in self.param_groups:
            group["step_id"] += 1
            # A mean comes for parameters without a gradient on this rank, too.
            moved = [p for p in group["params"] if p.grad is not None or p in self.averaged]
            if not moved:  # _foreach functions refuse empty lists
                continue
            if warm:
                self._take_momentum(group, moved)
            else:
                self._update_moments(group, moved)
            self._move(group, moved)
        self.averaged.clear()  # a mean counts once
        return loss

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        found = [self.state[parameter]["exp_avg"] for parameter in parameters]
        return list(map(part, found)) if self.sharded else found

    def _second_moments(self, parameters: list[Tensor]) -> list[Tensor]:
        found = [self.state[parameter]["exp_avg_sq"] for parameter in parameters]
        return list(map(part, found)) if self.sharded else found

    def _update_moments(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """A step of the warm-up: both moments."""
        gradients = self._gradients(group, parameters)
        beta1, beta2 = group["betas"]
        mix(self._momenta(parameters), gradients, beta1)
        squares = self._second_moments(parameters)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        if group["step_id"] == group["warmup_steps"]:
            for square in squares:
                if group["floor"] and square.numel():  # the mean of no elements is NaN
                    square.clamp_(min=group["floor"] ** 2 * square.mean().item())
                # A step of g / eps would throw elements without a second moment far off.
                square.masked_fill_(square == 0, torch.inf)

    def _take_momentum(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Takes the momentum after the warm-up: the mean over ranks, or this rank's own if nobody made a mean."""
        given = [parameter for parameter in parameters if parameter in self.averaged]
        if given:
            torch._foreach_copy_(self._momenta(given), [self.averaged[parameter] for parameter in given])
        own = [parameter for parameter in parameters if parameter not in self.averaged]
        if own:
            mix(self._momenta(own), self._gradients(group, own), group["betas"][0])

    def _gradients(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        if self.sharded:
            parameters, gradients = list(map(part, parameters)), list(map(part, gradients))
        return with_decay(group, parameters, gradients)

    def denominators(self, group: dict[str, Any], parameters: list[Tensor], step: int) -> list[Tensor]:
        """√v / √(1-β2^step) + eps of parameters of one group, each of its parameter's shape."""
        found = list(torch._foreach_sqrt(self._second_moments(parameters)))
        torch._foreach_div_(found, (1 - group["betas"][1] ** step) ** 0.5)
        torch._foreach_add_(found, group["eps"])
        return found

    def _move(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        k = group["step_id"]
        scales = self.denominators(group, parameters, k)
        rate = group["lr"] / (1 - group["betas"][0] ** k)
        moved = list(map(part, parameters)) if self.sharded else parameters
        torch._foreach_addcdiv_(moved, self._momenta(parameters), scales, -rate)


def with_decay(group: dict[str, Any], parameters: list[Tensor], gradients: list[Any]) -> list[Tensor]:
    """Gradients plus weight_decay · x. Raises RuntimeError for sparse ones."""
    if any(gradient.is_sparse for gradient in gradients):
        raise RuntimeError(
            "QAdamOptimizer can't work with sparse gradients: use sparse=False in the embedding. [BG601]"
        )
    if group["weight_decay"] == 0:
        return gradients
    return list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))


def mix(momenta: list[Tensor], gradients: list[Tensor], beta1: float) -> None:
    """m = β1 m + (1-β1) g"""
    torch._foreach_mul_(momenta, beta1)
    torch._foreach_add_(momenta, gradients, alpha=1 - beta1)


class QAdamAlgorithmImpl(AlgorithmImpl):
    """``QAdamAlgorithm`` at work on one model. ``optimizer`` is known when the model's optimizers are."""

    takes_sparse = False
    refuses_join = REFUSES_MOMENTS

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
        """Steps that the optimizer has done; a name of the original."""
        return 0 if self.optimizer is None else self.optimizer.step_id

    def need_reset(self) -> bool:
        """True when the warm-up is over, and when a state from before its end has been loaded since."""
        return self.optimizer is not None and self.optimizer.warm != self._compresses

    def init_tensors(self, bagua_ddp: DataParallel) -> list[torch.nn.Parameter]:
        """Raises ValueError for optimizers that don't fit."""
        self.optimizer = find_optimizer(bagua_ddp, QAdamOptimizer, self.optimizer)
        self._groups = {parameter: group for group in self.optimizer.param_groups for parameter in group["params"]}
        strange = [name for name, parameter in bagua_ddp.bagua_build_params() if whole(parameter) not in self._groups]
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
        parameters = wholes(bucket)
        give = functools.partial(self._contribute, parameters)
        contribute = Local(give, "momentum of this rank", reads=(GRADIENT,), writes=(MOMENTUM,))
        average = AllReduce("AVG", MOMENTUM, MOMENTUM, codec=self.codec, everywhere=everywhere)
        take = functools.partial(self._hand_over, parameters)
        hand_over = Local(take, "momentum for the optimizer", reads=(MOMENTUM,))
        bucket.set_plan(Plan((contribute, average, hand_over)))

    def _contribute(self, held: list[Tensor], bucket: Bucket) -> None:
        """MOMENTUM = β1 m + (1-β1) g, with m as it was after the optimizer's last step: several backward passes
        before the next one add up in g, and m is counted once. ``scaled``: divided by the next step's denominator."""
        assert self.optimizer is not None
        targets, gradients = bucket.views(MOMENTUM), bucket.views(GRADIENT)
        for group, numbers in self._by_group(held):
            parameters = [held[number] for number in numbers]
            mixed = [targets[number] for number in numbers]
            torch._foreach_copy_(mixed, self.optimizer._momenta(parameters))
            weights = list(map(part, parameters)) if self.optimizer.sharded else parameters
            found = with_decay(group, weights, [gradients[number] for number in numbers])
            mix(mixed, found, group["betas"][0])
            if self.scaled:
                torch._foreach_div_(mixed, self.optimizer.denominators(group, parameters, group["step_id"] + 1))

    def _by_group(self, parameters: list[Tensor]) -> list[tuple[dict[str, Any], list[int]]]:
        """Numbers of a bucket's parameters, by the optimizer's groups of settings."""
        found: dict[int, tuple[dict[str, Any], list[int]]] = {}
        for number, parameter in enumerate(parameters):
            group = self._groups[parameter]
            found.setdefault(id(group), (group, []))[1].append(number)  # groups are dictionaries, which can't be keys
        return list(found.values())

    def _hand_over(self, held: list[Tensor], bucket: Bucket) -> None:
        assert self.optimizer is not None
        momenta = bucket.views(MOMENTUM)
        if self.scaled:
            for group, numbers in self._by_group(held):
                parameters = [held[number] for number in numbers]
                scales = self.optimizer.denominators(group, parameters, group["step_id"] + 1)
                for number, scale in zip(numbers, scales, strict=True):
                    momenta[number].mul_(scale.masked_fill_(scale == torch.inf, 0))  # such elements never move
        self.optimizer.averaged.update(zip(held, momenta, strict=True))

    def close(self) -> None:
        """Forgets what has not been applied."""
        if self.optimizer is not None:
            self.optimizer.averaged.clear()


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
