"""Costs of samples, learned from the time that batches take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch

from bagua.torch_api.comm.primitives import allreduce
from bagua.torch_api.job.session import current, is_initialized

FEATURES = 3  # of a sample of size s: 1, s and s * s


class Measurements:
    """``costs``: in microseconds for each sample, float64 of shape [samples]; the same on all ranks.

    With sizes, a batch's time is taken for the sum of w0 + w1 s + w2 s^2 over its samples of size s, as a transformer's
    is. The weights are those of the least squares that are not negative, over all batches of all ranks.

    Without them each sample has a cost of its own. A batch's time is first divided evenly among its samples; when they
    come in other batches, their costs are multiplied so that they come nearer to the time of each: the multiplicative
    algebraic reconstruction of Gordon, Bender and Herman (1970), damped. One sample in a batch needs one epoch, eight
    samples need many.
    """

    def __init__(self, length: int, sizes: torch.Tensor | None) -> None:
        self.costs = torch.zeros(length, dtype=torch.float64) if sizes is None else sizes
        # About 1: squares of large sizes would make the equations ill-conditioned.
        self._sizes = sizes / sizes.mean().clamp_min(1e-300) if sizes is not None else None
        self._sums = torch.zeros(FEATURES, FEATURES + 1, dtype=torch.float64)
        self._own: dict[int, float] = {}  # costs of samples that this rank has measured since the last exchange
        self._warm = False

    def timed(self, loader: Any, indices: torch.Tensor, size: int, clock: Callable[[], float] | None) -> Iterator[Any]:
        """The batches of ``loader``, of ``size`` samples each, in the order of ``indices``. The first one of the job is
        not counted: it has the warm-up in it."""
        now = clock or own_time()
        for number, batch in enumerate(loader):
            began = now()
            yield batch
            if self._warm:  # the first one warms up: it took longer than its samples cost
                self.record(indices[number * size : (number + 1) * size], now() - began)
            self._warm = True

    def record(self, indices: torch.Tensor, seconds: float) -> None:
        """A batch of these samples took so long. Takes effect with the next ``exchange``."""
        microseconds = max(0.0, seconds) * 1e6  # a clock of the program's may go back
        if not len(indices):
            return
        if self._sizes is not None:
            sizes = self._sizes[indices]
            row = torch.stack([torch.ones_like(sizes), sizes, sizes * sizes]).sum(1)
            self._sums += torch.outer(row, torch.cat([row, row.new_tensor([microseconds])]))
            return
        before = [self._own.get(index, float(self.costs[index])) for index in indices.tolist()]
        known = [cost for cost in before if cost > 0.0]
        fresh = sum(known) / len(known) if known else microseconds / len(before)
        filled = [cost or fresh for cost in before]
        ratio = microseconds / sum(filled) if sum(filled) > 0.0 else 1.0
        damped = ratio if not known else ratio**0.5
        self._own.update((index, cost * damped) for index, cost in zip(indices.tolist(), filled, strict=True))

    def exchange(self) -> bool:
        """Shares what each rank has measured with all ranks of the job. False: nothing was measured, and costs are as
        before.
        """
        if self._sizes is not None:
            return self._fit(_summed(self._sums.clone()))
        found = torch.zeros(2, len(self.costs), dtype=torch.float64)
        if self._own:
            indices = torch.tensor(list(self._own), dtype=torch.int64)
            found[0, indices] = torch.tensor(list(self._own.values()), dtype=torch.float64)
            found[1, indices] = 1.0  # how many ranks have measured the sample
            self._own.clear()
        total, count = _summed(found)
        if not bool(count.any()):
            return False
        self.costs = torch.where(count > 0, total / count.clamp_min(1.0), self.costs)
        return True

    def _fit(self, sums: torch.Tensor) -> bool:
        assert self._sizes is not None
        weights = _least_squares(sums[:, :FEATURES], sums[:, FEATURES])
        if weights is None:
            return False
        self.costs = weights[0] + self._sizes * (weights[1] + self._sizes * weights[2])  # Horner's scheme
        return True


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, the same bits on all of them."""
    if not is_initialized() or current().membership.world_size == 1:
        return tensor
    total = torch.empty_like(tensor)
    allreduce(tensor, total)
    return total


def _least_squares(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor | None:
    """The x from 0 on with the smallest x' matrix x / 2 - right' x; None if it is all zero. Tries which of its few
    elements are zero."""
    best: tuple[float, torch.Tensor] | None = None
    for count in range(1, FEATURES + 1):
        for chosen in map(list, combinations(range(FEATURES), count)):
            part = matrix[chosen][:, chosen]
            # Driver gelsd: the matrix may be singular, as with samples of one size.
            found = torch.linalg.lstsq(part, right[chosen].unsqueeze(1), driver="gelsd").solution.squeeze(1)
            loss = float(found @ part @ found / 2 - right[chosen] @ found)
            if bool((found >= 0).all()) and loss < 0 and (best is None or loss < best[0]):
                weights = torch.zeros(FEATURES, dtype=torch.float64)
                weights[chosen] = found
                best = loss, weights
    return best[1] if best is not None else None


def own_time() -> Callable[[], float]:
    """A clock that stands still while this rank waits for others in backward passes."""
    if not is_initialized():
        return time.perf_counter
    statistics = current().statistics
    return lambda: time.perf_counter() - statistics.waited_ns / 1e9
