"""Samplers of the original that give all ranks samples of like cost at the same time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch

from bagua.torch_api.data.complexity import Cost, check_share, costs_of, length_of, rising
from bagua.torch_api.data.measured import Measurements
from bagua.torch_api.data.resumable import Legs, ResumableSampler, numbers
from bagua.torch_api.job.session import current

Batches = list[list[int]]
MEASURED = "measured"


class LoadBalancingDistributedSampler(ResumableSampler[int]):
    """Shares out a dataset so that the samples that ranks train on at the same time cost about the same.

    Samples are sorted by cost and cut into chunks of ``num_replicas``; chunks are shuffled; of each, every rank gets
    one sample. So the batches of a step cost about the same on all ranks. Semantics and random numbers are those of the
    original (``bagua.torch_api.contrib``, version 0.9.2): the same arguments give the same samples.

    Ten million samples take 2 s and 600 MB, beside the calls of ``complexity_fn``.

    Args:
        dataset: With a length, which must stay.
        complexity_fn: A function of a sample that returns its cost, a number from 0 on; or the costs by index, as a
            tensor or sequence; or "measured": costs are learned from ``timed`` steps.
        num_replicas: Number of ranks; those of the job by default.
        rank: This one.
        shuffle: Random in each epoch, else chunks come by rising cost.
        seed: Of the random numbers, the same on all ranks.
        drop_last: Leaves out the samples that do not fill a chunk; else the cheapest ones fill the last one, too.
        random_level: From 0 (chunks of like samples) to 1 (nearly random ones): costs are compared with noise of so
            much of their range, so that epochs differ more.
        size_fn: With "measured" alone: a function of a sample, or sizes by index, from which costs are predicted.

    Raises ValueError for an empty dataset, costs that are negative or NaN, and arguments that make no sense.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Cost | str,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0,
        *,
        size_fn: Cost | None = None,
    ) -> None:
        super().__init__(dataset, length_of(dataset), num_replicas, rank, seed)
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.num_samples = self._per_rank(self._length, self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        self._level = check_share(random_level, "random_level")
        self.measurements: Measurements | None = None
        if isinstance(complexity_fn, str):
            if complexity_fn != MEASURED:
                raise ValueError(
                    f'complexity_fn is {complexity_fn!r}: pass a function, costs, or "{MEASURED}". [BG701]'
                )
            sizes = None if size_fn is None else costs_of(dataset, size_fn, "size_fn")
            self.measurements = Measurements(self._length, sizes)
            self._use(self.measurements.costs)
        elif size_fn is not None:
            raise ValueError(f'size_fn goes with complexity_fn="{MEASURED}" alone. [BG701]')
        else:
            self._use(costs_of(dataset, complexity_fn, "complexity_fn"))

    def _use(self, costs: torch.Tensor) -> None:
        self.costs = costs
        # The original's formula: noise is below this number.
        self.random_number = int((costs.max() - costs.min()).item() * self._level + 1)
        self._sorted: torch.Tensor | None = None

    @property
    def item_complexity_map(self) -> dict[int, float]:
        """Costs of samples by index."""
        return dict(enumerate(self.costs.tolist()))

    @property
    def ordered_item_complexity_map(self) -> dict[int, float]:
        """The same, by rising cost."""
        return {index: self.costs[index].item() for index in rising(self.costs).tolist()}

    def _per_rank(self, length: int, replicas: int) -> int:
        return length // replicas if self.drop_last else -(-length // replicas)

    def _order(self) -> tuple[torch.Tensor, torch.Generator]:
        """Returns (indices by rising cost, the source of the rest of this epoch's random numbers)."""
        generator = torch.Generator(device="cpu")
        generator.manual_seed(self.seed + self.epoch)
        if self.shuffle:
            # Drawn in any case: random numbers after it are those of the original.
            noise = torch.randint(self.random_number, (self._length,), generator=generator)
            if self.random_number > 1:
                return rising(self.costs + noise), generator
        if self._sorted is None:
            self._sorted = rising(self.costs)
        return self._sorted, generator

    def _chunks(self, order: torch.Tensor, replicas: int) -> torch.Tensor:
        count = self._per_rank(len(order), replicas)
        if count * replicas > len(order):
            # The cheapest samples fill the last chunk, as in the original.
            order = torch.cat([order, order[torch.arange(count * replicas - len(order)) % len(order)]])
        return order[: count * replicas].view(count, replicas)

    def dealt(
        self, legs: Legs | None = None, used: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Samples of all ranks in the order of this epoch: int64 of shape [samples of each, ranks]. ``legs``: the
        course so far; ``used(dealt, given)``: samples that a leg has used."""
        order, generator = self._order()

        def deal(left: torch.Tensor, replicas: int) -> torch.Tensor:
            chunks = self._chunks(left, replicas)
            return chunks[torch.randperm(len(chunks), generator=generator)] if self.shuffle else chunks

        course = legs or Legs(self.num_replicas)
        found: torch.Tensor = course.rest(order, deal, used or (lambda dealt, given: dealt[:given].flatten()))
        return found

    def shuffle_chunks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (chunks: int64 of shape [num_samples, num_replicas], their order in this epoch: int64 of shape
        [num_samples]), as in the original."""
        order, generator = self._order()
        chunks = self._chunks(order, self.num_replicas)
        count = len(chunks)
        return chunks, torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)

    def _items(self, legs: Legs) -> Iterator[int]:
        mine = self.dealt(legs)[legs.given :, self.rank].contiguous()
        return numbers(mine)

    def __len__(self) -> int:
        """Samples of each rank in a whole epoch."""
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Gives the epoch an order of its own. Call it before each epoch, on all ranks. With measured costs ranks
        exchange here all that they have measured since.
        """
        if self.measurements is not None and self.measurements.exchange():
            self._use(self.measurements.costs)
        super().set_epoch(epoch)

    def timed(self, loader: Any, clock: Callable[[], float] | None = None) -> Iterator[Any]:
        """The batches of ``loader``, a DataLoader with this sampler, with the time that each of them takes until the
        next one is asked for. ``clock``: seconds that this rank has worked so far; by default the time that passes less
        the time that it waits for other ranks in backward passes. Raises ValueError unless complexity_fn is "measured",
        BaguaError before ``init_process_group`` where there are several ranks.
        """
        if self.measurements is None:
            raise ValueError(f'timed() is for complexity_fn="{MEASURED}". [BG701]')
        if self.num_replicas > 1 and current().membership.world_size != self.num_replicas:
            raise ValueError(
                f"The sampler has num_replicas={self.num_replicas}, and the job has {current().membership.world_size} "
                "ranks: measurements are exchanged among all ranks of the job. [BG701]"
            )
        size = getattr(loader, "batch_size", None)
        if not isinstance(size, int):
            raise ValueError(
                "timed() needs a loader with a batch_size: else it can't tell which samples are in a batch. [BG701]"
            )
        mine = self.dealt(self._legs if self._resumed else None)[:, self.rank]
        begin = self._legs.given if self._resumed else 0
        return self.measurements.timed(loader, mine[begin:].contiguous(), size, clock)


class LoadBalancingDistributedBatchSampler(ResumableSampler[list[int]]):
    """Batches of a ``LoadBalancingDistributedSampler``'s samples, made by ``batch_fn``; all ranks get the same number.

    Args:
        sampler: Whose samples; without drop_last.
        batch_fn: Takes the indices of one rank's samples in the order of the epoch, returns batches of indices (lists).
            It is called for every rank on every rank, with the random numbers of ``random`` and ``torch`` seeded alike,
            so that all know how many batches each has.
        drop_last: All ranks have as many batches as the one with the fewest; else the others repeat their first ones.

    Raises ValueError if batch_fn returns something else, or no batch at all for a rank.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: Callable[[list[int]], Iterable[Iterable[int]]],
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise ValueError(
                f"sampler is a {type(sampler).__name__}: it must be a LoadBalancingDistributedSampler. [BG701]"
            )
        if sampler.drop_last:
            raise ValueError(
                "The sampler has drop_last=True: drop_last of the batch sampler says what is left out. [BG701]"
            )
        super().__init__(sampler.dataset, len(sampler.costs), sampler.num_replicas, sampler.rank, sampler.seed)
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self.epoch = sampler.epoch
        self.generate_batches()

    def generate_batches(self) -> None:
        """Makes the batches of this epoch, or of its rest. ``set_epoch`` does it."""
        self._made_of = self.sampler.costs, self._legs.before
        self.padded_batches = self._batches(self.sampler.dealt(self._legs, self._used))
        self.total_batch = len(self.padded_batches[self.rank])

    def _used(self, dealt: torch.Tensor, given: int) -> torch.Tensor:
        first = [index for batches in self._batches(dealt) for batch in batches[:given] for index in batch]
        return torch.tensor(first, dtype=torch.int64)

    def _batches(self, dealt: torch.Tensor) -> list[Batches]:
        """Makes the batches of all ranks, equally many for each. ``dealt``: int64 of shape [samples of each, ranks]."""
        ranks = range(dealt.shape[1])
        if not len(dealt):
            return [[] for _ in ranks]
        made = [self._batches_of(dealt[:, rank].tolist(), rank) for rank in ranks]
        counts = [len(batches) for batches in made]
        if self.drop_last:
            return [batches[: min(counts)] for batches in made]
        if not min(counts):
            raise ValueError(
                f"batch_fn returned no batch for rank {counts.index(0)}, which has {len(dealt)} samples. [BG701]"
            )
        return [list(islice(cycle(batches), max(counts))) for batches in made]

    def _batches_of(self, indices: list[int], rank: int) -> Batches:
        before = random.getstate()  # random numbers of the program go on as if none had been drawn here
        with torch.random.fork_rng(devices=[]):  # by default it would save and restore the state of every GPU
            seed = (self.seed + self.epoch) * self.num_replicas + rank
            torch.default_generator.manual_seed(seed)  # ``torch.manual_seed`` would seed GPUs, too
            random.seed(seed)
            try:
                return [[int(index) for index in batch] for batch in self.batch_fn(indices)]
            except TypeError as error:
                raise ValueError(f"batch_fn must return a list of lists of indices: {error}. [BG701]") from error
            finally:
                random.setstate(before)

    def _items(self, legs: Legs) -> Iterator[list[int]]:
        if self._made_of[1] != legs.before:  # the last iteration was that of a rest
            self.generate_batches()
        return islice(self.padded_batches[self.rank], legs.given, None)

    def __len__(self) -> int:
        """Batches of each rank in this epoch, or in its rest."""
        return self.total_batch

    def set_epoch(self, epoch: int) -> None:
        """Gives the epoch an order of its own. Call it before each epoch, on all ranks."""
        before = self.epoch
        self.sampler.set_epoch(epoch)
        super().set_epoch(epoch)
        if epoch != before or self._made_of[0] is not self.sampler.costs:
            self.generate_batches()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a state, from which the next iteration goes on; see ``ResumableSampler.load_state_dict``."""
        super().load_state_dict(state)
        self.sampler.epoch = self.epoch
        self.generate_batches()
