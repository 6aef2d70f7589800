"""Learning rates that follow the number of ranks of an elastic job."""

from __future__ import annotations

import math
from typing import Any

import torch

from bagua.torch_api.comm.joining import on_membership_change
from bagua.torch_api.comm.membership_change import MembershipChange

RULES = ("linear", "sqrt")
RATES = ("base_lrs", "max_lrs", "min_lrs")  # Attributes of schedulers, with a rate for each group of parameters


def scale_lr(rule: str, *optimizers: Any) -> None:
    """Makes learning rates of these optimizers follow the number of ranks, and with it the global batch.

    ``rule``: "linear" multiplies them by n / m when m ranks become n (arXiv:1706.02677), as suits SGD;
    "sqrt" by the root of that (arXiv:1404.5997, arXiv:2205.10287), as suits Adam.
    ``optimizers``: with their schedulers, if there are any. It makes no sense with a fixed ``global_batch``.

    Raises ValueError for another rule, TypeError for other objects, BaguaError before ``init_process_group``.
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}: choose one of {', '.join(RULES)}. [BG711]")
    if not optimizers:
        raise TypeError(
            "scale_lr needs the optimizers whose learning rates it is to change, and their schedulers. [BG711]"
        )
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer) and not any(hasattr(one, name) for name in RATES):
            raise TypeError(
                f"scale_lr got a {type(one).__name__}: pass optimizers and learning rate schedulers; of a scheduler "
                "that is made of others pass these. [BG711]"
            )

    def follow(change: MembershipChange) -> None:
        ratio = change.world_size / change.previous_world_size
        scale(optimizers, ratio if rule == "linear" else math.sqrt(ratio))

    on_membership_change(follow)


def scale(optimizers: tuple[Any, ...], factor: float) -> None:
    """Multiplies learning rates, and those that schedulers start from, or stay between."""
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            for name in RATES:
                if hasattr(one, name):
                    setattr(one, name, [rate * factor for rate in getattr(one, name)])
            continue
        for group in one.param_groups:
            for name in ("lr", "initial_lr", "max_lr", "min_lr"):
                if name in group:
                    group[name] = group[name] * factor
