"""Batches by cost, not by count: each costs at most a budget, and those of a step cost about the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import cycle, islice
from typing import Any

import torch

from bagua.torch_api.data.complexity import Cost, costs_of, length_of, rising
from bagua.torch_api.data.resumable import BLOCK, Legs, ResumableSampler


@dataclass(frozen=True)
class Steps:
    """``order``: samples, int64. Batch b is ``order[begins[b]:ends[b]]``. ``table``: int64 of shape [steps, ranks],
    numbers of batches."""

    order: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    table: torch.Tensor

    def samples(self, steps: int) -> torch.Tensor:
        """Returns all samples of the first ``steps`` steps."""
        numbers = self.table[:steps].flatten().tolist()
        parts = [self.order[int(self.begins[number]) : int(self.ends[number])] for number in numbers]
        return torch.cat(parts) if parts else self.order[:0]


class TokenBudgetBatchSampler(ResumableSampler[list[int]]):
    """Batches of samples of like cost, each within a budget: many short samples, or few long ones.

    Samples are sorted by cost, and cut into batches as large as the budget allows. Neighbours of this order form a
    step, one for each rank; steps come in random order. Each epoch uses each sample once: where the number of batches
    is no multiple of the number of ranks, batches of the cheapest samples are halved. Only where these are of one
    sample some are used twice. Equal costs are in random order, so batches differ between epochs.

    Batches have different numbers of samples, on different ranks too. If every token is to count alike, divide the loss
    by a constant number of tokens, such as the budget, and not by that of the batch.

    For ``DataLoader(dataset, batch_sampler=...)``. It is resumable: see ``ResumableSampler``.

    Args:
        dataset: With a length, which must stay.
        cost_fn: A function of a sample that returns its cost, such as its number of tokens; or the costs by index, as
            a tensor or sequence. Numbers from 0 on.
        budget: Most cost of a batch, in the same unit.
        padded: A batch costs its most expensive sample times their number, as when all are padded to the longest; else
            the sum of their costs.
        max_samples: Most samples of a batch; None: no limit.
        num_replicas: Number of ranks; those of the job by default.
        rank: This one.
        shuffle: Random in each epoch; else steps come by rising cost.
        seed: Of the random numbers, the same on all ranks.

    Raises ValueError for a sample that costs more than the budget, costs that are negative or NaN, an empty dataset,
    and arguments that make no sense.
    """

    def __init__(
        self,
        dataset: Any,
        cost_fn: Cost,
        budget: float,
        *,
        padded: bool = True,
        max_samples: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(dataset, length_of(dataset), num_replicas, rank, seed)
        if not budget > 0:
            raise ValueError(f"budget is {budget}: it must be a number above 0. [BG701]")
        if max_samples is not None and max_samples < 1:
            raise ValueError(f"max_samples is {max_samples}: it must be a whole number from 1 on, or None. [BG701]")
        self.costs = costs_of(dataset, cost_fn, "cost_fn")
        over = torch.nonzero(self.costs > budget)
        if len(over):
            index = int(over[0])
            raise ValueError(
                f"Sample {index} costs {self.costs[index].item():g}, more than the budget of {budget:g} (and "
                f"{len(over) - 1} more do): raise the budget, or leave them out of the dataset. [BG702]"
            )
        self.budget, self.padded, self.max_samples, self.shuffle = budget, padded, max_samples, shuffle
        self._made: tuple[object, Steps] | None = None

    def _steps(self, legs: Legs) -> Steps:
        """Cuts the steps of the last leg."""
        key = self.epoch, legs.before
        if self._made is not None and self._made[0] == key:  # the program asks for its length, and then iterates
            return self._made[1]
        generator = torch.Generator(device="cpu")
        generator.manual_seed(self.seed + self.epoch)
        if self.shuffle:
            # Shuffled before it is sorted: equal costs come in another order in each epoch.
            order = torch.randperm(self._length, generator=generator)
            order = order[rising(self.costs[order])]
        else:
            order = rising(self.costs)

        def deal(left: torch.Tensor, replicas: int) -> Steps:
            return self._deal(left, replicas, generator)

        found: Steps = legs.rest(order, deal, lambda dealt, given: dealt.samples(given))
        self._made = key, found
        return found

    def _deal(self, order: torch.Tensor, replicas: int, generator: torch.Generator) -> Steps:
        if not len(order):
            return Steps(order, order, order, order.view(0, replicas))
        costs = self.costs[order]
        begins = self._cut(costs)
        ends = torch.cat([begins[1:], torch.tensor([len(order)])])[: len(begins)]
        odd = len(begins) % replicas
        if odd:  # the first step, of the cheapest samples: their batches are large, so they can be divided
            spans = self._fill(costs, list(zip(begins[:odd].tolist(), ends[:odd].tolist(), strict=True)), replicas)
            filled = torch.tensor(spans, dtype=torch.int64)
            begins, ends = torch.cat([filled[:, 0], begins[odd:]]), torch.cat([filled[:, 1], ends[odd:]])
        table = torch.arange(len(begins)).view(-1, replicas)
        if self.shuffle:
            table = table[torch.randperm(len(table), generator=generator)]
            # The rank that gets a batch of a step is random, too.
            turns = torch.rand(table.shape, generator=generator).argsort(1)
            table = table.gather(1, turns)
        return Steps(order, begins, ends, table)

    def _cut(self, costs: torch.Tensor) -> torch.Tensor:
        """Returns where batches begin, for samples of these rising costs."""
        last = _furthest_padded(costs, self.budget) if self.padded else _furthest_summed(costs, self.budget)
        if self.max_samples is not None:
            last = torch.minimum(last, torch.arange(len(costs)) + self.max_samples)
        return _walked(last)

    def _fill(self, costs: torch.Tensor, spans: list[tuple[int, int]], wanted: int) -> list[tuple[int, int]]:
        """Halves the most expensive of these batches until there are so many; repeats some if all are of one sample."""
        queue = [(-self._cost(costs, begin, end), begin, end) for begin, end in spans if end > begin + 1]
        whole = [(begin, end) for begin, end in spans if end == begin + 1]
        heapify(queue)
        while queue and len(queue) + len(whole) < wanted:
            _, begin, end = heappop(queue)
            middle = (begin + end) // 2
            for half in ((begin, middle), (middle, end)):
                if half[1] > half[0] + 1:
                    heappush(queue, (-self._cost(costs, *half), *half))
                else:
                    whole.append(half)
        found = sorted(whole + [(begin, end) for _, begin, end in queue])
        return list(islice(cycle(found), wanted))  # batches of one sample can't be halved: some come twice

    def _cost(self, costs: torch.Tensor, begin: int, end: int) -> float:
        return float(costs[end - 1] * (end - begin) if self.padded else costs[begin:end].sum())

    def _items(self, legs: Legs) -> Iterator[list[int]]:
        steps = self._steps(legs)
        for number in steps.table[legs.given :, self.rank].tolist():
            yield steps.order[int(steps.begins[number]) : int(steps.ends[number])].tolist()

    def __len__(self) -> int:
        """Batches of each rank in this epoch, or in its rest."""
        return len(self._steps(self._legs).table)


def _walked(following: torch.Tensor) -> torch.Tensor:
    """0, following[0], following[following[0]] and so on, below the length of ``following``."""
    found, at, end = [], 0, len(following)
    for base in range(0, end, BLOCK):  # blocks of Python's integers: quick to read, and little memory
        block = following[base : base + BLOCK].tolist()
        while at < base + len(block):
            found.append(at)
            at = block[at - base]
    return torch.tensor(found, dtype=torch.int64)


def _furthest_summed(costs: torch.Tensor, budget: float) -> torch.Tensor:
    """Returns, for each begin of a batch, the furthest end with at most this sum of costs. A batch has at least one
    sample.
    """
    total = costs.cumsum(0)
    reached = torch.searchsorted(total, total - costs + budget, right=True)
    return torch.maximum(reached, torch.arange(1, len(costs) + 1))


def _furthest_padded(costs: torch.Tensor, budget: float) -> torch.Tensor:
    """Returns the same, if a batch costs its last sample times their number. ``costs`` rise, and none is above the
    budget.
    """
    ends = torch.arange(1, len(costs) + 1)
    # The earliest begin of a batch with each end. It rises with the end, so the furthest end can be looked up.
    # A cost of 0 makes the quotient infinite.
    earliest = ends - (budget / costs).clamp_max(len(costs)).floor().to(torch.int64)
    return torch.searchsorted(earliest, ends - 1, right=True)
