"""The optimizer of QAdam."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class QAdamOptimizer(torch.optim.Optimizer):
    """Adam whose second moment v stops changing after a warm-up, so that momentum m can be averaged over ranks encoded.

    With k the number of the step, from 1, g the gradient plus ``weight_decay`` · x:

        k <= warmup_steps:  m = β1 m + (1-β1) g;   v = β2 v + (1-β2) g²
        afterwards:         m = mean over ranks of C(β1 m + (1-β1) g);   v stays
        always:             x -= lr / (1-β1^k) · m / (√v / √(1-β2^k) + eps)

    ``QAdamAlgorithm`` gives the mean; without it this rank's own m takes its place. Tang et al., "1-bit Adam:
    Communication Efficient Large-Scale Training with Adam's Convergence Speed", ICML 2021.

    Two things are other than in the original: the gradient of step ``warmup_steps`` is used (there it is lost), and
    weight decay stays after the warm-up. And elements that had no gradient in the warm-up (v is 0: rows of an
    embedding that no batch had) stay as they are after it, where the original divides by eps and throws them far off:
    ``exp_avg_sq`` is infinite for them then. As √(1-β2^k) goes on growing, steps get longer by up to
    1/√(1-β2^warmup_steps) after the warm-up. One of 1/(1-β2) steps or more keeps that small; or lower β2, or the
    learning rate.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate. betas: β1 and β2. weight_decay: L2 penalty.
        eps: Added to the denominator. After the warm-up it also bounds what a codec's error becomes where v is small.
        warmup_steps: Steps with full gradients, at least 1.
        floor: When the warm-up ends, √v of every element becomes at least this share of its root mean square over the
            parameter; 0: it stays as it is. An element that has hardly had a gradient until then would fly off with its
            first, or with the codec's error of others. 0.1 is a good choice, and leaves eps to rounding.

    Raises ValueError for values that can't be, RuntimeError (in ``step``) for sparse gradients.
    """

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
        _check(lr, warmup_steps, betas, eps, weight_decay, floor)
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
        for parameter in self.param_groups[-1]["params"]:
            self.state[parameter] = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.averaged = {}
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
        return self.step_id + 1 != self.warmup_steps or not any(group["floor"] for group in self.param_groups)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes one step. ``closure``, if there is one, computes the loss once more; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        warm = self.warm
        for group in self.param_groups:
            group["step_id"] += 1
            moved = [p for p in group["params"] if p.grad is not None or p in self.averaged]
            if not moved:
                continue
            if warm:
                self._take_momentum(group, moved)
            else:
                self._observe(group, moved)
            self._move(group, moved)
        self.averaged.clear()
        return loss

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        return [self.state[parameter]["exp_avg"] for parameter in parameters]

    def _second_moments(self, parameters: list[Tensor]) -> list[Tensor]:
        return [self.state[parameter]["exp_avg_sq"] for parameter in parameters]

    def _observe(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """A step of the warm-up: both moments."""
        gradients = with_decay(group, parameters, [parameter.grad for parameter in parameters])
        beta1, beta2 = group["betas"]
        mix(self._momenta(parameters), gradients, beta1)
        squares = self._second_moments(parameters)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        if group["step_id"] == group["warmup_steps"]:
            for square in squares:
                if group["floor"] and square.numel():
                    square.clamp_(min=group["floor"] ** 2 * square.mean().item())
                square.masked_fill_(square == 0, torch.inf)

    def _take_momentum(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Takes the momentum after the warm-up: the mean over ranks, or this rank's own if nobody made a mean."""
        given = [parameter for parameter in parameters if parameter in self.averaged]
        if given:
            torch._foreach_copy_(self._momenta(given), [self.averaged[parameter] for parameter in given])
        own = [parameter for parameter in parameters if parameter not in self.averaged]
        if own:
            gradients = with_decay(group, own, [parameter.grad for parameter in own])
            mix(self._momenta(own), gradients, group["betas"][0])

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
        torch._foreach_addcdiv_(parameters, self._momenta(parameters), scales, -rate)


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


def _check(
    lr: float, warmup_steps: int, betas: tuple[float, float], eps: float, weight_decay: float, floor: float
) -> None:
    if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
        raise ValueError(f"warmup_steps is {warmup_steps!r}: it must be a whole number, at least 1. [BG302]")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay), ("floor", floor)):
        if not value >= 0:
            raise ValueError(f"{name} is {value!r}: it must be at least 0. [BG302]")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas!r}: both must be at least 0 and below 1. [BG302]")
