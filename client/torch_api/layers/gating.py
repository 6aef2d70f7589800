"""Decides which expert computes which token: one or two experts for each, at most a certain number of tokens for each
expert.

Top-1 is the gate of Switch Transformers (Fedus, Zoph and Shazeer, 2021), top-2 that of GShard (Lepikhin et al., 2020),
with the formulas of the original's layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

JITTER = 1e-2
POLICIES = (None, "None", "Jitter", "RSample")


@dataclass(frozen=True)
class Choice:
    """The experts of this rank's tokens. A token has up to k of them.

    ``counts``: int64 [experts] on the CPU, how many of the tokens go to each. The rest has an entry for each token that
    goes to an expert, first those for expert 0, each expert's in the order of tokens: ``tokens`` int64 [rows], which
    token it is, ``weights`` float32 [rows], by how much the expert's result is multiplied. ``rows_of``: int64, the rows
    of token 0, of token 1, ...; those of token t begin at ``first_row`` [tokens] [t].

    ``loss``: float32 number, the auxiliary loss, which is least where all experts get equally many tokens. ``wanted``:
    int64 [experts] on the CPU, tokens whose first choice each expert was.
    """

    counts: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor
    rows_of: torch.Tensor
    first_row: torch.Tensor
    loss: torch.Tensor
    wanted: torch.Tensor


class TopKGate(nn.Module):
    """Chooses k experts (1 or 2) of ``num_experts`` for each token float [tokens, model_dim].

    Computes in float32, also under autocast. An expert gets at most ``capacity_factor`` (in evaluation
    ``eval_capacity_factor``) times k * tokens / num_experts of this rank's tokens, rounded up, and ``min_capacity`` at
    least. Tokens beyond that do without the expert. With k=1 they are drawn by lot in training, else they are the last
    ones; with k=2 first choices go before second ones.

    ``noisy_gate_policy``, in training alone: "Jitter" multiplies the gate's input by 0.99 to 1.01, "RSample" adds
    Gumbel noise when the expert is chosen (k=1). With k=2 the second one is always chosen with such noise in training.
    """

    wg: nn.Linear

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
    ) -> None:
        super().__init__()
        if k not in (1, 2):
            raise ValueError(f"k is {k!r}: a token goes to 1 expert, or to 2.")
        if num_experts < k:
            raise ValueError(f"There are {num_experts} experts: k={k} needs at least {k}.")
        if noisy_gate_policy not in POLICIES:
            raise ValueError(f"noisy_gate_policy is {noisy_gate_policy!r}: choose None, 'Jitter' or 'RSample'.")
        if not (capacity_factor > 0 and eval_capacity_factor > 0 and min_capacity >= 0):
            raise ValueError(
                f"capacity_factor={capacity_factor}, eval_capacity_factor={eval_capacity_factor} and min_capacity="
                f"{min_capacity}: factors must be positive, and the minimum not negative."
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = noisy_gate_policy

    def capacity(self, tokens: int) -> int:
        """The most that an expert gets of so many tokens."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        return max(self.min_capacity, math.ceil(self.k * tokens / self.wg.out_features * factor))

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Choice:
        """``used_token``: [tokens], true or 1 for those that count; others go nowhere. Raises ValueError if it has
        another number of elements."""
        used = None if used_token is None else used_token.detach().reshape(-1).bool()
        if used is not None and len(used) != len(tokens):
            raise ValueError(f"used_token has {len(used)} elements: there are {len(tokens)} tokens.")
        with torch.autocast(tokens.device.type, enabled=False):
            inputs = tokens.float()
            if self.noisy_gate_policy == "Jitter" and self.training:
                inputs = multiplicative_jitter(inputs)
            logits = F.linear(inputs, self.wg.weight.float())
            return self._choose(logits, F.softmax(logits, dim=1), used)

    def _choose(self, logits: torch.Tensor, gates: torch.Tensor, used: torch.Tensor | None) -> Choice:
        tokens, experts = gates.shape
        chosen = self._experts(logits.detach())  # [k, tokens]
        wants = chosen if used is None else chosen.masked_fill(~used, experts)  # that number: none
        kept = _within(wants, experts, self.capacity(tokens), by_lot=self.k == 1 and self.training)
        weights = gates.gather(1, chosen.t()).t() * kept  # [k, tokens]
        if self.k == 2:
            weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
        wanted = torch.bincount(wants[0], minlength=experts + 1)[:experts]
        share = wanted / max(1, tokens)
        loss = (gates.mean(0) * share).sum() * experts if tokens else gates.sum()
        return _in_rows(torch.where(kept, wants, experts), weights, loss, wanted.cpu())

    def _experts(self, logits: torch.Tensor) -> torch.Tensor:
        noisy = self.training and (self.k == 2 or self.noisy_gate_policy == "RSample")
        with_noise = logits + gumbel_rsample(logits.shape, logits.device) if noisy else logits
        if self.k == 1:
            return with_noise.argmax(1).unsqueeze(0)
        first = logits.argmax(1)
        return torch.stack([first, with_noise.scatter(1, first.unsqueeze(1), -math.inf).argmax(1)])


def multiplicative_jitter(x: torch.Tensor, device: torch.device | None = None, epsilon: float = JITTER) -> torch.Tensor:
    """``x`` times random numbers from 1 - ``epsilon`` to 1 + ``epsilon``. ``device``: accepted; it is that of ``x``."""
    return x * torch.empty_like(x).uniform_(1 - epsilon, 1 + epsilon)


def gumbel_rsample(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Gumbel noise float32 of this shape: added to logits, the largest one is a draw from their softmax."""
    return -torch.empty(*shape, device=device).exponential_().log()


def _within(wants: torch.Tensor, experts: int, capacity: int, by_lot: bool) -> torch.Tensor:
    """bool [k, tokens]: whether the choice is among the first ``capacity`` for its expert: first choices come before
    second ones, and each in the order of tokens, or ``by_lot`` in a random one."""
    flat = wants.reshape(-1)
    queue = torch.randperm(len(flat), device=flat.device) if by_lot else None
    ordered = flat if queue is None else flat[queue]
    order = ordered.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)
    places = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[ordered[order]]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order if queue is None else queue[order]] = places < capacity
    return (kept & (flat < experts)).view(wants.shape)


def _in_rows(goes: torch.Tensor, weights: torch.Tensor, loss: torch.Tensor, wanted: torch.Tensor) -> Choice:
    """``goes``, ``weights``: [k, tokens]. ``goes``: the expert, or their number for none."""
    flat, tokens, experts = goes.reshape(-1), goes.shape[1], len(wanted)
    kept = goes < experts
    counts = torch.bincount(flat, minlength=experts + 1)[:experts].cpu()
    order = flat.argsort(stable=True)[: int(counts.sum())]
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(len(order), device=flat.device)
    each = kept.sum(0)
    return Choice(
        counts=counts,
        tokens=order % max(1, tokens),
        weights=weights.reshape(-1)[order],
        rows_of=rows.view(goes.shape).t()[kept.t()],
        first_row=each.cumsum(0) - each,
        loss=loss,
        wanted=wanted,
    )
