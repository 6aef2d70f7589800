"""Finds replicas that have drifted apart: ranks compare a checksum of each parameter, now and then.

A moment is the end of an exchange of gradients, which comes equally often on all ranks. All parameters have made the
same steps then. In the normal case one all-reduce goes: of the largest and the least checksum of each parameter. All
ranks see the same and decide the same; if a parameter differs, they tell each other its checksums.

A checksum is a sum in float64 with random weights of size 0.5 to 1.5 and either sign. Where a parameter differs by a
vector of length d, its checksums differ by about d, whatever the difference looks like. (A plain sum does not see the
steps of a last layer: those gradients add up to 0.)

Kernels of different processors differ in the last bits, and these differences add up. Over 10,000 steps of SGD, Adam,
RMSprop and Adagrad with vectors of AVX-512 on one rank and without vectors on the other, parameters of float32 and
bfloat16 differed by at most 0.3 * eps * sqrt(steps) of their norm; where each step's result was moved to a neighbouring
number, by 1.2. One missed step of Adam with lr=1e-4 differs by 40,000 eps.
"""

from __future__ import annotations

import functools
import logging
import math
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from bagua.base.errors import BaguaError
from bagua.base.replica_check import CheckReplicas
from bagua.torch_api.comm.shards import local_part
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.step.parameters import shared_state
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.wrapped import Wrapped

LOG = logging.getLogger("bagua")

FIRST = (1, 2, 3, 10, 100)
"""Exchanges after which ranks compare: the first sees a state that was loaded after wrapping, before any step."""
EVERY = 500
"""And after each so many: a comparison takes a fifth of a step, or less."""
ALLOWED = 4.0
"""Differences that are allowed, in eps * sqrt(exchanges) of a parameter's norm."""
NOT_FINITE = 1e300
"""Takes the place of checksums that are infinite or no number, which no all-reduce orders."""
NAMES = 3
"""Parameters that a warning names."""


class Difference(NamedTuple):
    """Parameters whose replicas on ``ranks`` differ from those of most ranks, by at most ``share`` of their norm;
    infinite where some have values that are not finite."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    share: float


class ReplicaCheck:
    """Compares replicas of one wrapped model. ``exchanges``: of gradients, since ranks had the same parameters last."""

    def __init__(self, model: Wrapped, runner: Runner) -> None:
        self.exchanges = 0
        self._module = model.module
        self._runner = runner
        self._setting = model.check_replicas
        shared = {name for name, _ in shared_state(model.module, model.parameters_to_ignore)}  # others are a rank's own
        parameters = {name: one for name, one in model.module.named_parameters() if name in shared and _adds_up(one)}
        self._names = list(parameters)
        self._divided = model.is_sharded
        self._eps = torch.tensor([_eps(one.dtype) for one in parameters.values()], dtype=torch.float64, device="cpu")
        self._norms = torch.zeros_like(self._eps)  # the largest so far: what a step rounds off does not shrink later
        self._told: set[str] = set()

    def after_exchange(self, comparable: bool) -> None:
        """Gradients have been exchanged. ``comparable``: replicas are to be the same now; the same on all ranks. Raises
        BaguaError, on all ranks, if they differ and that is to end the job."""
        self.exchanges += 1
        due = self.exchanges in FIRST or self.exchanges % EVERY == 0
        # Ranks of an island that have no element of any parameter vote with the others.
        if not (due and comparable and (self._names or self._divided)) or self._setting is CheckReplicas.off:
            return
        if self._runner.everyone.nranks() == 1:
            return
        found = self._runner.vote.together(self._compare)
        names = {name for one in found for name in one.names}
        if names <= self._told:  # told once for each parameter
            return
        self._told |= names
        text = describe(found, self.exchanges, len(self._names))
        if self._setting is CheckReplicas.error:
            raise BaguaError(f"{text} [BG617]")
        if self._runner.everyone.rank() == 0:
            LOG.warning("%s [BG617]", text)

    @torch.no_grad()
    def _compare(self) -> list[Difference]:
        group = self._runner.everyone
        # Names are looked up anew: parameters may have been replaced.
        parameters = dict(self._module.named_parameters())
        sums, norms = _checksums([parameters.get(name) for name in self._names])
        self._norms = torch.maximum(self._norms, norms)
        kind = torch.tensor([float(arithmetic())], dtype=torch.float64, device="cpu")
        # The least, too, by one reduction: with its sign turned.
        largest = torch.cat([sums, -sums, kind, -kind, self._norms])
        group.allreduce_inplace(largest, ReduceOp.MAX)
        count = len(sums)
        most, minus_least, kinds, norms = torch.split(largest, [count, count, 2, count])
        # All ranks have the same kernels: coarser dtypes round alike.
        eps = torch.full_like(self._eps, _eps(torch.float32)) if kinds.sum() == 0 else self._eps
        allowed = ALLOWED * self.exchanges**0.5 * eps * norms
        which = (most + minus_least > allowed).nonzero().view(-1)
        if not len(which):
            return []
        everyone = torch.zeros(group.nranks(), len(which), dtype=torch.float64, device="cpu")
        group.allgather(sums[which].contiguous(), everyone)
        names = [self._names[index] for index in which.tolist()]
        return find_odd_ranks(names, everyone, allowed[which], norms[which], group.ranks)


def find_odd_ranks(
    names: Sequence[str], sums: torch.Tensor, allowed: torch.Tensor, norms: torch.Tensor, ranks: Sequence[int]
) -> list[Difference]:
    """``sums`` [ranks, names]: checksums. Right is the one that most ranks have; of several such, the first rank's."""
    found: dict[tuple[int, ...], tuple[list[str], float]] = {}
    for name, column, most, norm in zip(names, sums.T, allowed.tolist(), norms.tolist(), strict=True):
        near = (column[:, None] - column[None, :]).abs() <= most
        right = int(near.sum(1).argmax())  # the first of equal ones
        odd = tuple(rank for rank, fits in zip(ranks, near[right].tolist(), strict=True) if not fits)
        off = float((column - column[right]).abs().max())
        share = off / norm if off < NOT_FINITE / 2 else math.inf
        with_it, largest = found.setdefault(odd, ([], 0.0))
        with_it.append(name)
        found[odd] = with_it, max(largest, share)
    return [Difference(odd, tuple(some), share) for odd, (some, share) in found.items()]


def describe(found: Sequence[Difference], exchange: int, parameters: int) -> str:
    """Says, for people, what differs, why it may, and what to do."""
    parts = []
    for one in found:
        more = len(one.names) - NAMES
        names = ", ".join(one.names[:NAMES]) + (f" and {more} more" if more > 0 else "")
        size = f"by {one.share:.1g} of their size" if one.share < math.inf else "some values are not finite"
        ranks = f"rank{'s' if len(one.ranks) > 1 else ''} {', '.join(map(str, one.ranks))}"
        parts.append(f"{ranks} in {names} ({len(one.names)} of {parameters} parameters, {size})")
    return (
        f"Replicas have drifted apart. After exchange {exchange} of gradients these differ from the other ranks: "
        f"{'; '.join(parts)}. Load states, step optimizers, and set gradients and parameters, on all ranks alike, or "
        "before the model is wrapped, which gives rank 0's state to all. Names of parameters that are each rank's own "
        "belong into the module's _bagua_params_and_buffers_to_ignore. BAGUA_CHECK_REPLICAS=off compares nothing."
    )


def _checksums(parameters: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Checksums and norms, on the host. A parameter that is gone (None) has those of one without finite values."""
    pairs = [checksum(one) if one is not None else None for one in parameters]
    device = next((pair.device for pair in pairs if pair is not None), torch.device("cpu"))
    gone = torch.full((2,), torch.nan, dtype=torch.float64, device=device)
    # All devices of a model are one: the host waits for it once.
    found = torch.cat([gone if pair is None else pair.to(device) for pair in pairs]) if pairs else gone[:0]
    sums, norms = found.cpu().view(-1, 2).unbind(1)
    return sums.nan_to_num(NOT_FINITE, NOT_FINITE, NOT_FINITE), norms.nan_to_num(0.0, 0.0, 0.0)


def checksum(parameter: torch.Tensor) -> torch.Tensor:
    """[2]: the checksum of the parameter, and its norm, in float64 on its device."""
    flat = local_part(parameter).detach().reshape(-1)  # in the order of its indices, whatever its strides
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    weights = _weights(flat.device)
    sums, squares = [], []
    for part in torch.split(flat, len(weights)):  # a copy of the whole in float64 would not stay in the cache
        wide = part.to(torch.float64)
        sums.append(torch.dot(wide, weights[: len(wide)]))
        squares.append(torch.dot(wide, wide))
    if len(sums) == 1:
        return torch.stack([sums[0], squares[0].sqrt()])
    # A sum of sums: few numbers, whatever the size.
    return torch.stack([checksum(torch.stack(sums))[0], torch.stack(squares).sum().sqrt()])


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Random weights, the same on all ranks: as many as are in the cache with the part of a parameter, on a device as
    one launch is worth."""
    count = 1 << 15 if device.type == "cpu" else 1 << 22
    # A seed, so that all ranks draw the same.
    drawn = torch.rand(count, dtype=torch.float64, device="cpu", generator=torch.Generator().manual_seed(39))
    signs = torch.where(drawn < 0.5, -1.0, 1.0)  # none is near 0, which would not see its element
    return (signs * (0.5 + (drawn * 2) % 1)).to(device)


def _adds_up(parameter: torch.Tensor) -> bool:
    """Returns True if it has a checksum: values of its own in memory of its own."""
    parameter = local_part(parameter).detach()
    plain = type(parameter) is torch.Tensor and parameter.layout is torch.strided
    return plain and not (parameter.is_meta or parameter.is_quantized or parameter.numel() == 0)


def _eps(dtype: torch.dtype) -> float:
    """The distance of numbers near 1, of float32 at least: sums of more exact ones are no more exact for that."""
    least = torch.finfo(torch.float32).eps
    return max(torch.finfo(dtype).eps, least) if dtype.is_floating_point or dtype.is_complex else least


def arithmetic() -> int:
    """A number of the kernels that compute on this rank: where it is the same, so are their bits."""
    return zlib.crc32(f"{_processor()} {torch.get_num_threads()}".encode())


@functools.cache
def _processor() -> str:
    """Names of the processor, of its instructions, and of the version that uses them."""
    lines: set[str] = set()
    with suppress(OSError):
        told = Path("/proc/cpuinfo").read_text().splitlines()
        # Names of x86 and ARM.
        lines = {line for line in told if line.startswith(("model name", "flags", "CPU part", "Features"))}
    return " ".join([torch.__version__, torch.backends.cpu.get_cpu_capability(), PORT.cuda.name(), *sorted(lines)])
