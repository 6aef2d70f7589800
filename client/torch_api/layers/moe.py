"""Mixture of experts: a layer whose parts are computed on different ranks, each token by one or two of them.

Attribute names are the original's: ``bagua_moe``, ``experts`` and ``bagua_experts`` are parts of names in checkpoints.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.comm.communicator import NON_COMM_MEMBER, Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup, communicator_of_group
from bagua.torch_api.job import environment
from bagua.torch_api.job.session import current, is_initialized
from bagua.torch_api.layers.expert_travel import Routes, combine, dispatch
from bagua.torch_api.layers.gating import TopKGate

EXPERT = "expert"


def is_moe_param(param: torch.Tensor) -> bool:
    """True for a parameter, or a buffer, of an expert: each rank has its own."""
    return bool(getattr(param, EXPERT, False))


class Experts(nn.Module):
    """The experts of this rank: ``num_local_experts`` copies of ``expert``. Their parameters and buffers have the
    attribute ``expert``, which keeps them out of all exchange between ranks."""

    def __init__(self, expert: nn.Module, num_local_experts: int = 1) -> None:
        super().__init__()
        self.bagua_experts = nn.ModuleList([copy.deepcopy(expert) for _ in range(num_local_experts)])
        self.num_local_experts = num_local_experts
        self._mark()

    def _mark(self) -> None:
        for tensor in (*self.parameters(), *self.buffers()):
            setattr(tensor, EXPERT, True)

    # Where torch makes tensors anew, without attributes of ours: in .to() and its like, in copies, in unpickling.

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._mark()

    def forward(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Applies each expert to its tensor [rows, width], and returns one for each. If an expert returns a tuple, its
        first part counts. Raises ValueError if one returns another shape.
        """
        results = []
        for number, (expert, rows) in enumerate(zip(self.bagua_experts, inputs, strict=True)):
            made = expert(rows)
            made = made[0] if isinstance(made, tuple) else made
            if made.shape != rows.shape:
                raise ValueError(
                    f"Expert {number} of this rank made {list(made.shape)} of {list(rows.shape)}: an expert keeps the "
                    "shape [tokens, hidden_size]. [BG610]"
                )
            results.append(made)
        return results


class MOELayer(nn.Module):
    """Gate, way out, experts, way back. ``l_aux`` and ``exp_counts``: of the last forward pass."""

    l_aux: torch.Tensor
    exp_counts: torch.Tensor

    def __init__(
        self, gate: TopKGate, experts: Experts, num_local_experts: int, group: Any = None, average: bool = True
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.num_local_experts = num_local_experts
        self.group = group
        self.average = average
        self._agreed: weakref.ref[Communicator] | None = None  # weak: a communicator ends with its last reference

    @property
    def world_size(self) -> int:
        """Ranks that share the experts."""
        return self.gate.wg.out_features // self.num_local_experts

    def __getstate__(self) -> dict[str, Any]:
        """Copies agree with the other ranks by themselves."""
        return {**super().__getstate__(), "_agreed": None}  # type: ignore[no-untyped-call]

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        width = self.gate.wg.in_features
        if hidden_states.shape[-1] != width:
            raise ValueError(
                f"The input has shape {list(hidden_states.shape)}: its last dimension must be {width}. [BG610]"
            )
        comm = self._communicator()
        tokens = hidden_states.reshape(-1, width)
        choice = self.gate(tokens, used_token)
        self.l_aux, self.exp_counts = choice.loss, choice.wanted
        routes = Routes.of(choice, comm, self.num_local_experts, self.average, tokens)
        return combine(self.experts(dispatch(choice.passed, routes)), routes).view(hidden_states.shape)

    def _communicator(self) -> Communicator | None:
        """Returns the communicator; None if this process has all experts. Raises ConfigError where they can't be
        shared, BaguaError, on all ranks, if they made different layers.
        """
        comm = members(self.group)
        ranks, experts = 1 if comm is None else comm.nranks(), self.gate.wg.out_features
        if ranks * self.num_local_experts != experts:
            raise ConfigError(
                f"The layer was made for {experts} experts, {self.num_local_experts} of them on this rank, and now "
                f"there are {ranks} ranks. Make it after init_process_group(), with the same process group. [BG610]"
            )
        if comm is None or ranks == 1:
            return None
        if self._agreed is None or self._agreed() is not comm:  # once for a communicator: it is an exchange
            self._compare(comm)
            self._agreed = weakref.ref(comm)
        return comm

    def _compare(self, comm: Communicator) -> None:
        # ``torch.set_default_device`` may have named another one.
        mine = torch.tensor([self.num_local_experts, self.gate.wg.in_features, self.average], device="cpu")
        found = mine.new_empty(comm.nranks(), len(mine))
        comm.allgather(mine, found)
        if not bool((found == found[0]).all()):
            rows = "; ".join(f"rank {rank}: {row}" for rank, row in zip(comm.ranks, found.tolist(), strict=True))
            raise BaguaError(
                f"The ranks' MoE layers differ. (num_local_experts, hidden_size, average) are {rows}. Make the same "
                "layer on every rank. [BG603]"
            )


class MoE(nn.Module):
    """A layer of ``num_local_experts`` experts on each rank; each token is computed by ``k`` of all experts.

    Parameters of experts are trained by the tokens that come to them from all ranks, and no algorithm exchanges them
    (``is_moe_param``). With ``average`` their gradients are those of the mean of all ranks' losses, as averaged
    gradients of other parameters are; without, those of the sum, as in the original. All ranks call the layer, forward
    and backward, as often as each other, with any number of tokens, also none. It can't be used in an elastic job: a
    rank that is lost takes its experts along.

    Args:
        hidden_size: Elements of a token.
        expert: A module [tokens, hidden_size] -> the same shape. Each expert begins as a copy of it, on each rank of
            the one that this rank has.
        num_local_experts: Experts on each rank.
        k: Experts for each token, 1 or 2.
        output_dropout_prob: Dropout of the result.
        capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy: See ``TopKGate``.
        num_experts: Experts on all ranks together; instead of ``num_local_experts``.
        process_group: The ranks that share the experts; None: all.
        average: See above.

    Raises ConfigError in an elastic job, ValueError for experts that the ranks can't share equally, and for other
    arguments that can't be.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        *,
        num_experts: int | None = None,
        process_group: Any = None,
        average: bool = True,
    ) -> None:
        super().__init__()
        ranks = _number_of_ranks(process_group)
        if num_experts is not None:
            if num_experts < 1 or num_experts % ranks:
                raise ValueError(
                    f"{num_experts} experts can't be shared equally by {ranks} ranks: choose a multiple of {ranks}, or "
                    "another number of ranks. [BG610]"
                )
            num_local_experts = num_experts // ranks
        if num_local_experts < 1:
            raise ValueError(f"num_local_experts is {num_local_experts}: each rank has at least one expert. [BG610]")
        self.num_experts = num_local_experts * ranks
        gate = TopKGate(
            hidden_size, self.num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy
        )
        experts = Experts(expert, num_local_experts)
        self.bagua_moe = MOELayer(gate, experts, num_local_experts, process_group, average)
        self.dropout = nn.Dropout(output_dropout_prob)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (result, auxiliary loss, counts) of ``hidden_states`` float [..., hidden_size].

        ``used_token``: as many elements as tokens; those with 0 or False go to no expert, and their result is zeros, as
        is that of tokens beyond an expert's capacity. Result: the shape of ``hidden_states``. Auxiliary loss: a float32
        number for this rank's tokens, to be added to the loss with a small factor; without it few experts get all
        tokens. Counts: int64 [num_experts] on the CPU, tokens of this rank whose first choice each expert was.
        """
        result = self.bagua_moe(hidden_states, used_token)
        return self.dropout(result), self.bagua_moe.l_aux, self.bagua_moe.exp_counts


def _number_of_ranks(group: Any) -> int:
    """Returns the number of ranks, also before ``init_process_group`` if no group is named."""
    if not is_initialized() and group is None:
        return environment.get_world_size()
    if isinstance(group, BaguaProcessGroup):
        return len(group.ranks)
    comm = members(group)
    return 1 if comm is None else comm.nranks()


def members(group: Any) -> Communicator | None:
    """The ranks that share the experts of a layer with this group. None: a process without a job. Raises ConfigError in
    an elastic job, and on a rank that is no member."""
    if not is_initialized() and group is None and environment.get_world_size() == 1:
        return None
    if current().elastic:
        raise ConfigError(
            "A MoE layer can't be used in an elastic job: a rank that is lost takes its experts along. Start the job "
            "without --elastic. [BG610]"
        )
    comm = communicator_of_group(group)
    if comm is NON_COMM_MEMBER:
        raise ConfigError("This rank is no member of the layer's process group: only members call the layer. [BG610]")
    return comm
