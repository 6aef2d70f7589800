"""Adam whose variance can be frozen, the common base of the optimizers of 1-bit and 0/1 Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bagua.algorithms.checks import check_adam
from bagua.algorithms.weights import part


class FrozenAdam(torch.optim.Optimizer):
    """Adam (with decoupled weight decay) whose variance can be frozen: what 1-bit and 0/1 Adam share.

    While it warms up, for gradient g, with m and v as in Adam: x = x - η (m / (1-β1^k)) / (√(v / (1-β2^j)) + ε), after
    k steps and j updates of v. ``freeze`` fixes the denominator D = √(v / (1-β2^j)) + ε for good. From then on the
    state holds u = m / D in place of m, and s = 1 / D in place of v.

    State per parameter: ``exp_avg`` (m, then u), ``exp_avg_sq`` (v, then s). In every parameter group, under the names
    in ``progress``: k, j, and 1 for frozen.
    """

    sharded = False  # ranks hold parts of its parameters
    progress: tuple[str, ...] = ("steps", "variance_steps", "frozen")
    elementwise = False  # for fuse_optimizer: its floor follows from all of a parameter

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        floor: float,
    ) -> None:
        check_adam(betas, lr=lr, eps=eps, weight_decay=weight_decay, floor=floor)
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, floor=floor)
        super().__init__(params, defaults | dict.fromkeys(self.progress, 0))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group that is as far as the first."""
        if self.param_groups:
            # Or it would be in its warm-up while others are frozen.
            param_group = {**param_group, **{name: self.param_groups[0][name] for name in self.progress}}
        super().add_param_group(param_group)
        self.sharded = any(part(one) is not one for group in self.param_groups for one in group["params"])

    def groups_by_parameter(self) -> dict[torch.Tensor, dict[str, Any]]:
        """The group of every parameter. Loading a state makes new groups: ask each time."""
        return {parameter: group for group in self.param_groups for parameter in group["params"]}

    def freezes_after(self) -> int:
        """Steps before the variance freezes."""
        raise NotImplementedError(f"{type(self).__name__} must override freezes_after. [BG306]")

    def warm_step(self, group: dict[str, Any]) -> None:
        """Steps one group while the variance still follows the gradients."""
        self.adam_step(group)

    def frozen_step(self, group: dict[str, Any]) -> None:
        """Steps one group with the frozen variance."""
        raise NotImplementedError(f"{type(self).__name__} must override frozen_step. [BG306]")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes one step. ``closure``, if there is one, computes the loss once more; its value is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["frozen"]:
                self.frozen_step(group)
            else:
                self.warm_step(group)
        if not self.frozen and self.steps >= self.freezes_after():
            self.freeze()
        return loss

    @property
    def steps(self) -> int:
        """Number of steps taken so far."""
        return int(self.param_groups[0]["steps"])

    @property
    def frozen(self) -> bool:
        """True if the variance is frozen."""
        return bool(self.param_groups[0]["frozen"])

    def moments(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``exp_avg`` and ``exp_avg_sq`` of a parameter, zeros at first; of this rank's part, where there are parts."""
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if self.sharded:
            return part(state["exp_avg"]), part(state["exp_avg_sq"])
        return state["exp_avg"], state["exp_avg_sq"]

    @torch.no_grad()
    def freeze(self) -> None:
        """Fixes the denominators. A parameter's are raised to ``floor`` times their root mean square: an element that
        has hardly had a gradient so far would fly off at its first."""
        for group in self.param_groups:
            group["frozen"] = 1
            for parameter in group["params"]:
                momentum, scale = self.moments(parameter)
                # m / D is what travels, and 1 / D is kept: no division in later steps.
                momentum.mul_(torch.reciprocal(self.denominator(group, parameter), out=scale))

    @torch.no_grad()
    def denominator(self, group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
        """D of the variance as it is now, at least ``floor`` times its root mean square; the shape of the parameter,
        which is one of the group. Of a part: the part's."""
        found = self.moments(parameter)[1].sqrt()
        found.div_(math.sqrt(1 - group["betas"][1] ** max(1, group["variance_steps"]))).add_(group["eps"])
        if found.numel():  # a norm of nothing has no elements to divide by
            found.clamp_(min=group["floor"] * found.norm().item() / math.sqrt(found.numel()))
        return found

    def adam_step(self, group: dict[str, Any]) -> None:
        """Makes one step of Adam for one group, from ``.grad``."""
        self.observe(group, with_variance=True)
        parameters, _, momenta, variances = self.lists(group)
        denominators = list(torch._foreach_sqrt(variances))
        torch._foreach_div_(denominators, math.sqrt(1 - group["betas"][1] ** group["variance_steps"]))
        torch._foreach_add_(denominators, group["eps"])
        self.move(group, parameters, momenta, denominators)

    def observe(self, group: dict[str, Any], with_variance: bool) -> None:
        """Counts a step, and takes ``.grad`` into m; ``with_variance``: into v, too."""
        parameters, gradients, momenta, variances = self.lists(group)
        beta1, beta2 = group["betas"]
        group["steps"] += 1
        group["variance_steps"] += with_variance
        if not parameters:  # _foreach functions refuse empty lists
            return
        torch._foreach_lerp_(momenta, gradients, 1 - beta1)
        if with_variance:
            torch._foreach_mul_(variances, beta2)
            torch._foreach_addcmul_(variances, gradients, gradients, 1 - beta2)

    def move(
        self,
        group: dict[str, Any],
        parameters: list[torch.Tensor],
        momenta: list[torch.Tensor],
        denominators: list[torch.Tensor],
    ) -> None:
        """Weight decay, and x = x - η (m / (1-β1^k)) / D."""
        if parameters:
            self.decay(group, parameters)
            rate = group["lr"] / (1 - group["betas"][0] ** group["steps"])
            torch._foreach_addcdiv_(parameters, momenta, denominators, -rate)

    def decay(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        """Decoupled weight decay, as in AdamW."""
        if group["weight_decay"]:
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])

    def lists(self, group: dict[str, Any]) -> tuple[list[torch.Tensor], ...]:
        """Parameters that have a gradient, their gradients and moments; this rank's parts, where there are parts."""
        with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
        moments = [self.moments(parameter) for parameter in with_gradient]
        gradients = [parameter.grad for parameter in with_gradient]
        if self.sharded:
            with_gradient, gradients = list(map(part, with_gradient)), list(map(part, gradients))
        return with_gradient, gradients, [first for first, _ in moments], [second for _, second in moments]
