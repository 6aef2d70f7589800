"""The cost of each sample of a dataset, as one tensor: computed once, and checked. By it an elastic sampler makes the
ranks' batches of a round cost about the same.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.data.shares import Batch

# A function of a sample, or the costs themselves, by index: a tensor of shape [len(dataset)] is the quickest.
Cost: TypeAlias = Callable[[Any], float] | torch.Tensor | Sequence[float]

WHOLE = float((1 << 31) - 1)  # the largest number of an int32


def costs_of(dataset: Any, cost: Cost, name: str) -> torch.Tensor:
    """The cost of each sample: float64 of shape [len(dataset)], on the CPU. ``name``: of the argument, for errors.

    A function is called once for each sample. Raises ValueError for an empty dataset, for another number of costs than
    samples, and for costs that are negative, infinite or NaN; TypeError for a cost that is no number.
    """
    length = length_of(dataset)
    if isinstance(cost, str):
        raise TypeError(f"{name} is {cost!r}: pass a function of a sample, or one number for each sample. [BG702]")
    if isinstance(cost, torch.Tensor):
        found = cost.detach().to("cpu", torch.float64).clone()
    else:
        source: Iterable[Any] = map(cost, map(dataset.__getitem__, range(length))) if callable(cost) else cost
        found = _gathered(source, name)
    if found.shape != (length,):
        raise ValueError(
            f"{name} has shape {list(found.shape)}, and the dataset has {length} samples: it must have one number for "
            "each of them. [BG702]"
        )
    bad = torch.nonzero(~(found.isfinite() & (found >= 0)))
    if len(bad):
        index = int(bad[0])
        raise ValueError(
            f"{name} gave {found[index].item()} for sample {index} (and {len(bad) - 1} more are as bad): a cost is a "
            "finite number from 0 on. Mend the function, or leave such samples out of the dataset. [BG702]"
        )
    return found


def _gathered(source: Iterable[Any], name: str) -> torch.Tensor:
    gathered = array("d")  # array: eight bytes each; a list of Python's numbers takes several times as much
    try:
        gathered.extend(source)
    except (TypeError, OverflowError) as error:
        raise TypeError(
            f"{name} gave no number for sample {len(gathered)} ({error}): it must give one number for each sample. "
            "[BG702]"
        ) from error
    # A clone: the tensor would keep the array from growing.
    return torch.frombuffer(gathered, dtype=torch.float64).clone() if gathered else torch.empty(0, dtype=torch.float64)


def rising(costs: torch.Tensor) -> torch.Tensor:
    """Indices by rising cost, equal ones as they come: int64. Whole numbers are sorted as such, three times as fast."""
    whole = costs.clamp_max(WHOLE).to(torch.int32)
    return torch.argsort(whole if torch.equal(whole.double(), costs) else costs, stable=True)


def length_of(dataset: Any) -> int:
    """Samples of the dataset. Raises ValueError if it is empty."""
    length = len(dataset)
    if length < 1:
        raise ValueError("The dataset is empty: there is nothing to share out. [BG701]")
    return length


def check_length(dataset: Any, length: int) -> None:
    """Raises BaguaError if the dataset does not have so many samples any more."""
    now = len(dataset)
    if now != length:
        raise BaguaError(
            f"The dataset has {now} samples now, and had {length} when its sampler was made: ranks would not agree on "
            "who trains on what. Make a new sampler when the dataset changes. [BG704]"
        )


def check_share(share: float, name: str) -> float:
    """Raises ValueError unless it is from 0 to 1."""
    if not 0.0 <= share <= 1.0 or math.isnan(share):
        raise ValueError(f"{name} is {share}: it must be a number from 0 to 1. [BG701]")
    return share


def digest(costs: torch.Tensor) -> str:
    """A checksum, by which ranks tell whether they have the same costs. ``costs``: float64, contiguous."""
    memory = (ctypes.c_char * (costs.numel() * costs.element_size())).from_address(costs.data_ptr())
    return hashlib.blake2b(memory, digest_size=8).hexdigest()


def balanced_order(costs: torch.Tensor, chunk: int, random: torch.Generator) -> list[int]:
    """Orders all samples in chunks of like costs, which come in random order. The dearest ones, if they fill no chunk,
    come last.
    """
    # Shuffled before it is sorted: the sort is stable, and equal costs come in another order in each epoch.
    shuffled = torch.randperm(len(costs), generator=random)
    order = shuffled[rising(costs[shuffled])]
    whole = len(order) // chunk * chunk
    chunks = order[:whole].view(-1, chunk)
    return torch.cat([chunks[torch.randperm(len(chunks), generator=random)].flatten(), order[whole:]]).tolist()


def balanced_split(costs: Sequence[float], pool: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Divides the positions of a round among ranks: all get one of the dearest, then of the next ones, and so on; the
    dearest of them goes to the rank that has least so far. ``costs``: by position in the order of the epoch."""
    falling = sorted(pool, key=lambda position: (-costs[position], position))
    parts: list[list[int]] = [[] for _ in sizes]
    loads = [0.0] * len(sizes)
    begin = 0
    while begin < len(falling):
        open_ranks = [rank for rank, size in enumerate(sizes) if len(parts[rank]) < size]
        open_ranks.sort(key=lambda rank: loads[rank])
        for rank, position in zip(open_ranks, falling[begin:], strict=False):
            parts[rank].append(position)
            loads[rank] += costs[position]
        begin += len(open_ranks)
    return [tuple(part) for part in parts]
