"""The sampler of elastic jobs: each sample is in exactly one committed step of an epoch, through any changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

from bagua.torch_api.comm.checkpoint_state import keepers
from bagua.torch_api.comm.commit.retry import nothing, units
from bagua.torch_api.data.complexity import Cost, costs_of, digest
from bagua.torch_api.data.elastic_loader import ElasticLoader
from bagua.torch_api.data.epoch_progress import Course, Setting
from bagua.torch_api.job.session import current

LOG = logging.getLogger("bagua")


class ElasticSampler:
    """Shares out a dataset among the ranks of a job, elastic or not.

    Each epoch has an order of its own, which follows from ``seed`` and the epoch's number. A round takes the next
    samples of it: ``batch_size`` for each rank, or ``global_batch`` for all together, also when ranks come and go. The
    last round of an epoch is smaller, alike for all ranks. Fewer samples than ranks that are left open the next epoch.
    In the last one of ``epochs`` ranks get unequal shares of the last rounds, so that all samples are used. Where each
    rank has one sample in a round, or a rank is lost in the last one, some may be left, as a line in the log tells.

    A batch is used in the training step in whose time it was given out, and counts once that step is committed on all
    ranks. A rank that is lost gives back its batches that had not been committed: the others are given them next.

    Where shares of a round differ (``global_batch`` is no multiple of the number of ranks), each rank's gradients are
    weighted by its share, so that the mean over ranks is the mean over samples. They differ by at most one sample. A
    step that is repeated because a rank was lost in it is weighted by the shares of those that are left.

    Args:
        dataset: With a length, the same on all ranks.
        batch_size: Samples of each rank in a round. Either this or ``global_batch``.
        global_batch: Samples of all ranks together in a round.
        shuffle: A random order in each epoch; else that of the dataset.
        seed: Of the random orders, the same on all ranks.
        complexity_fn: What samples cost: a function of a sample, or numbers by index, as a tensor or sequence. The
            samples of a round are dealt out so that the ranks' batches cost about the same, as
            ``LoadBalancingDistributedSampler`` does it, whoever comes and goes.
        per_island: Ranks of an island get the same batches, as tensor parallelism needs them. ``batch_size`` is then
            that of an island, and the paragraphs above hold for islands in place of ranks.

    All ranks make their samplers in the same order, with the same arguments. Raises ValueError for arguments that make
    no sense, TypeError for a dataset without a length, BaguaError before ``init_process_group``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        global_batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        complexity_fn: Cost | None = None,
        per_island: bool = False,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} is a stream without a length, and the samples of a stream have no numbers "
                "that could be dealt out: pass a list of its pieces, such as files with ranges (docs/data.md#streams). "
                "[BG701]"
            )
        costs = None if complexity_fn is None else costs_of(dataset, complexity_fn, "complexity_fn")
        # Members compare checksums: the costs themselves may be millions of numbers.
        sum_of_costs = "" if costs is None else digest(costs)
        setting = Setting(len(dataset), batch_size, global_batch, shuffle, seed, sum_of_costs, per_island)
        self.dataset = dataset
        self._session = current()
        self._units = units(self._session) if self._session.elastic else None
        membership = self._session.membership
        self._course = Course(
            setting, membership.members, membership.member, membership.generation, costs, membership.island_size
        )
        keepers(self._session).add("sampler", self._course)
        if self._units is not None:
            self._units.followers.add("sampler", self._course)

    def state_dict(self) -> dict[str, str]:
        """Returns the place in the epoch, the same on all ranks, for a checkpoint: batches of committed steps are
        used."""
        return {"course": json.dumps(self._course.keep().document)}  # text: checkpoints cut up what has parts

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Goes on from there, with any number of ranks, which call it alike before the first batch. Raises ValueError
        for the state of another dataset or order."""
        document = json.loads(state["course"])
        if words := self._course.misfit(document):
            raise ValueError(f"This is the state of another ElasticSampler. {words} [BG701]")
        self._course.make_room(document, None)

    @property
    def epoch(self) -> int:
        """The present one, counted from 0."""
        return self._course.epoch

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of epochs from the present one to ``count`` - 1. An epoch of which the loop takes no batch, or
        not all, is given up when the next one is asked for, on all ranks alike.

        In an elastic job others may join from now on. A newcomer waits here until it is let in, and begins where the
        others are: with the present epoch, of which its loop takes the rest."""
        self._course.end_after(count)
        if self._units is not None:
            self._units.take_newcomers()
            self._units.join()
        while (epoch := self._course.epoch) < count:
            yield epoch
            if self._course.epoch == epoch:  # the loop took no batch, or not all
                self._course.end_epoch()
        if (unused := self._course.opening) and self._session.membership.rank == 0:  # one rank says it for all
            LOG.warning("%d samples, fewer than there are ranks, were left at the end, and are not used.", len(unused))

    def loader(self, **options: Any) -> ElasticLoader:
        """An iterable over this rank's batches of the rest of the present epoch. ``options``: of
        ``torch.utils.data.DataLoader``, such as num_workers and collate_fn, but for those that say which samples come.
        """
        for name in ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last"):
            if name in options:
                raise ValueError(
                    f"loader() can't take {name}: the sampler says which samples come, and how many. [BG701]"
                )
        if not options.get("in_order", True):
            raise ValueError(
                "loader() can't take in_order=False: batches are counted in the order in which they were asked for. "
                "[BG701]"
            )
        between_steps = self._between_steps if self._units is not None else nothing
        calm = self._units.calm if self._units is not None else nullcontext()
        return ElasticLoader(self._course, self.dataset, self._given, options, self._over, between_steps, calm)

    def _between_steps(self) -> None:
        assert self._units is not None
        if self._course.given:  # the loop gathers several batches for a step: ranks are not between two
            return
        if self._session.newcomer:  # its loop did not ask for ``epochs``
            self._units.join(marked=True)
        else:
            self._units.between_steps()

    def _given(self, weight: float) -> None:
        self._session.weigh_batch(weight)
        if not self._session.elastic:  # nobody is ever lost
            self._course.commit()

    def _over(self) -> None:
        """Batches that come from elsewhere have no share: they weigh as before."""
        self._session.weigh_batch(1.0)
