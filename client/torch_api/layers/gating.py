"""Decides which expert computes which token: one or two experts for each, at most a certain number of tokens for each
expert.

Top-1 is the gate of Switch Transformers (Fedus, Zoph and Shazeer, 2021), top-2 that of GShard (Lepikhin et al., 2020),
with the formulas of the original's layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

JITTER = 1e-2
POLICIES = (None, "None", "Jitter", "RSample")


@dataclass(frozen=True)
class Choice:
    """The experts of this rank's tokens. A token has up to k of them.

    ``counts``: int64 [experts] on the CPU, how many of the tokens go to each. The rest has an entry for each token that
    goes to an expert, first those for expert 0, each expert's in the order of tokens: ``tokens`` int64 [rows], which
    token it is, ``weights`` float32 [rows], by how much the expert's result is multiplied. ``rows_of``: int64, the rows
    of token 0, of token 1, ...; those of token t begin at ``first_row`` [tokens] [t].

    ``passed``: the tokens, for the dispatch alone: their gradient joins that of the gate in one pass. ``loss``: float32
    number, the auxiliary loss, which is least where all experts get equally many tokens. ``wanted``: int64 [experts] on
    the CPU, tokens whose first choice each expert was.
    """

    counts: torch.Tensor
    tokens: torch.Tensor
    weights: torch.Tensor
    rows_of: torch.Tensor
    first_row: torch.Tensor
    passed: torch.Tensor
    loss: torch.Tensor
    wanted: torch.Tensor


class _Logits(torch.autograd.Function):
    """Function (tokens, weight) -> (tokens, logits) for autograd. The gradient of the former is added up in the memory
    in which it comes, so that must be nobody else's.
    """

    @staticmethod
    def forward(context: Any, tokens: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        context.save_for_backward(tokens, weight)
        context.set_materialize_grads(False)  # no zeros are made for outputs that got no gradient
        return tokens.view_as(tokens), F.linear(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, of_tokens: torch.Tensor | None, of_logits: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        tokens, weight = context.saved_tensors
        if of_logits is None:
            return of_tokens, None
        of_weight = of_logits.t() @ tokens if context.needs_input_grad[1] else None
        if not context.needs_input_grad[0]:
            return None, of_weight
        if of_tokens is None:
            return of_logits @ weight, of_weight
        return of_tokens.addmm_(of_logits, weight), of_weight  # ``of_tokens`` is ours alone: no third tensor is made


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
            raise ValueError(f"k is {k!r}: a token goes to 1 expert, or to 2. [BG610]")
        if num_experts < k:
            raise ValueError(f"There are {num_experts} experts: k={k} needs at least {k}. [BG610]")
        if noisy_gate_policy not in POLICIES:
            raise ValueError(f"noisy_gate_policy is {noisy_gate_policy!r}: choose None, 'Jitter' or 'RSample'. [BG610]")
        if not (capacity_factor > 0 and eval_capacity_factor > 0 and min_capacity >= 0):
            raise ValueError(
                f"capacity_factor={capacity_factor}, eval_capacity_factor={eval_capacity_factor} and min_capacity="
                f"{min_capacity}: factors must be positive, and the minimum not negative. [BG610]"
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

    def forward(self, input: torch.Tensor, used_token: torch.Tensor | None = None) -> Choice:
        """``input``: [tokens, width]. ``used_token``: [tokens], true or 1 for those that count; others go nowhere.
        Raises ValueError if it has another number of elements."""
        used = None if used_token is None else used_token.detach().reshape(-1).bool()
        if used is not None and len(used) != len(input):
            raise ValueError(f"used_token has {len(used)} elements: there are {len(input)} tokens. [BG610]")
        # A context costs more than the question.
        if not torch.is_autocast_enabled(input.device.type):
            return self._route(input, used)
        with torch.autocast(input.device.type, enabled=False):
            return self._route(input, used)

    def _route(self, tokens: torch.Tensor, used: torch.Tensor | None) -> Choice:
        weight = self.wg.weight.float()
        if tokens.dtype is torch.float32 and not (self.noisy_gate_policy == "Jitter" and self.training):
            tokens, logits = _Logits.apply(tokens, weight)  # type: ignore[no-untyped-call]
        else:
            inputs = tokens.float()
            if self.noisy_gate_policy == "Jitter" and self.training:
                inputs = multiplicative_jitter(inputs)
            logits = F.linear(inputs, weight)
        # Over the second dimension it takes 20 times as long where experts are few: nothing is vectorised.
        return self._choose(tokens, logits, F.softmax(logits.t().contiguous(), dim=0), used)

    def _choose(
        self, passed: torch.Tensor, logits: torch.Tensor, gates: torch.Tensor, used: torch.Tensor | None
    ) -> Choice:
        experts, tokens = gates.shape
        chosen = self._experts(logits.detach())  # [k, tokens]
        wants = chosen if used is None else chosen.masked_fill(~used, experts)  # that number: none
        first = torch.bincount(wants[0], minlength=experts + 1)[:experts]
        counts = first if self.k == 1 else first + torch.bincount(wants[1], minlength=experts + 1)[:experts]
        capacity, on_host = self.capacity(tokens), counts.cpu()
        goes, all_go = wants, used is None
        if max(on_host.tolist()) > capacity:
            kept = _within(wants, experts, capacity, by_lot=self.k == 1 and self.training)
            goes, all_go = torch.where(kept, wants, experts), False
            on_host = on_host.clamp(max=capacity)
        if tokens:
            loss = torch.dot(gates.sum(1), first.to(gates.dtype)) * (experts / tokens / tokens)
        else:
            loss = gates.sum()  # no tokens: zero, with a gradient all the same
        return Choice(on_host, *_in_rows(gates, goes, on_host, all_go), passed, loss, first.cpu())

    def _experts(self, logits: torch.Tensor) -> torch.Tensor:
        noisy = self.training and (self.k == 2 or self.noisy_gate_policy == "RSample")
        with_noise = logits + gumbel_rsample(logits.shape, logits.device) if noisy else logits
        if self.k == 1:
            return with_noise.argmax(1).unsqueeze(0)
        first = logits.argmax(1)
        # The first one can't be chosen again.
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
    # A lottery before the sort: the sort is stable.
    queue = torch.randperm(len(flat), device=flat.device) if by_lot else None
    ordered = flat if queue is None else flat[queue]
    order = ordered.argsort(stable=True)
    counts = torch.bincount(flat, minlength=experts + 1)
    # Places count from each expert's first.
    places = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[ordered[order]]
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order if queue is None else queue[order]] = places < capacity
    return (kept & (flat < experts)).view(wants.shape)


def _in_rows(
    gates: torch.Tensor, goes: torch.Tensor, counts: torch.Tensor, all_go: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``tokens``, ``weights``, ``rows_of`` and ``first_row`` of a Choice.

    ``gates``: [experts, tokens]. ``goes``: int64 [k, tokens], the expert, or their number for none; ``all_go``: there
    is no such entry. ``counts``: how many go to each.
    """
    k, tokens = goes.shape
    number, order = goes.reshape(-1).sort(stable=True)  # by expert, in the order of tokens
    if not all_go:
        total = int(counts.sum())
        number, order = number[:total], order[:total]
    token = order if k == 1 else order % max(1, tokens)  # with two choices entries number tokens twice
    weights = gates.reshape(-1).index_select(0, number * tokens + token)  # gates lie by expert: one index for both
    rows = torch.empty(k * tokens, dtype=torch.int64, device=goes.device)
    rows[order] = torch.arange(len(order), device=goes.device)
    if all_go:
        rows_of = rows if k == 1 else rows.view(k, tokens).t().reshape(-1)
        first_row = torch.arange(0, k * tokens, k, device=goes.device)
    else:
        kept = goes < len(counts)
        each = kept.sum(0)
        rows_of, first_row = rows.view(k, tokens).t()[kept.t()], each.cumsum(0) - each
    if k == 2 and tokens:
        of_token = weights.new_zeros(tokens).index_add(0, token, weights)
        # Eps: a token whose experts have no weight.
        weights = weights / of_token.clamp(min=torch.finfo(weights.dtype).eps).index_select(0, token)
    return token, weights, rows_of, first_row
