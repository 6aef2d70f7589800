"""Makes the buckets of a model: in the algorithm's order at first, then in the order in which gradients arrive."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bagua.algorithms import AlgorithmImpl, BucketLayout
from bagua.algorithms.plan import GRADIENT, WEIGHT
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.shards import division_words, even_share
from bagua.torch_api.comm.transfer import ReduceOp
from bagua.torch_api.job import environment
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.bucket import PlanBucket
from bagua.torch_api.step.execution import Execution, NotReady
from bagua.torch_api.step.gradients import GradientBucket, elements_needed
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.agreement import raise_together
from bagua.torch_api.train.compat_hooks import Guest
from bagua.torch_api.train.grouping import group_tensors
from bagua.torch_api.train.wrapped import Wrapped
from bagua.tuning.grouping import bucket_bytes


class ModelBuckets:
    """The buckets of one wrapped model, the same on all ranks.

    ``arrival``: names in the order in which rank 0's gradients came, which buckets have when they are made next; empty
    before that is known. ``wanted_cuts``: names, bucket by bucket; empty: buckets are cut by their bytes.
    """

    def __init__(self, ddp: Wrapped, guest: Guest, session: Session, runner: Runner) -> None:
        self._ddp = ddp
        self._session = session
        self._runner = runner
        self._guest = guest
        self.buckets: list[PlanBucket] = []
        self._names: dict[torch.Tensor, str] = {}
        self._tensors: list[torch.Tensor] = []  # in the order of buckets
        self.arrival: list[str] = []
        self._anew = False  # buckets are made again whatever their order
        self._alone = False  # other ranks don't make theirs now
        self.wanted_cuts: list[list[str]] = []
        self._most: tuple[int, list[int]] = (0, [])  # generation, and in it the most starts of each bucket on a rank

    @property
    def _algorithm(self) -> AlgorithmImpl:
        return self._ddp.bagua_algorithm

    @property
    def gradient_buckets(self) -> list[GradientBucket]:
        """Buckets that fill and start by themselves."""
        return [bucket for bucket in self.buckets if isinstance(bucket, GradientBucket)]

    def make(self) -> None:
        """Buckets with memory and plans, in the order of arrival where that is known.

        Raises on every rank if it fails on one: BaguaError if memory is short, and errors of the algorithm.
        """
        self._names = {parameter: name for name, parameter in self._ddp.bagua_build_params()}
        with self._together():
            if self._algorithm.exchanged not in (GRADIENT, WEIGHT):
                raise BaguaError(
                    f"{type(self._algorithm).__name__}.exchanged is {self._algorithm.exchanged!r}: it must be "
                    f"{GRADIENT!r} or {WEIGHT!r}. [BG306]"
                )
            self._guest.begin()
            self._tensors = list(self._algorithm.init_tensors(self._ddp))
            if self._follows_arrival:
                place = {name: number for number, name in enumerate(self.arrival)}
                # Names that never came are last.
                self._tensors.sort(key=lambda tensor: place.get(self._name(tensor), len(place)))
            layouts = self._layouts()
            if not self._runner.on_device:
                # Before anything is made: memory that is short is told in words.
                self._session.memory.require(sum(map(self._bytes_needed, layouts)))
        self._fill(layouts)
        self._alone = False

    @property
    def _follows_arrival(self) -> bool:
        gradients = self._algorithm.exchanged == GRADIENT and self._guest.are_gradients(self._tensors)
        return gradients and self._algorithm.follows_arrival

    def wants_arrival(self) -> bool:
        """Returns True if the order of arrival is still to be learned."""
        return self._follows_arrival and not self.arrival and len(self._tensors) > 1

    def follow(self, arrivals: Sequence[str], again: bool) -> list[GradientBucket] | None:
        """Buckets in the order in which gradients came on rank 0, which tells it to all; None if it is the order that
        they have. Parameters that got no gradient there come last. Called by all ranks at the end of a pass.
        ``again``: a member was lost, and some ranks had got further than others."""
        if again:
            self.arrival = []
            self._anew = True  # ranks that had got further have made their buckets already
        by_name = {self._name(tensor): tensor for tensor in self._tensors}
        names = sorted(by_name)  # where a member was lost ranks may have tensors in another order than others have
        wanted = [*arrivals, *(name for name in by_name if name not in set(arrivals))]
        numbers = self._of_rank_0([names.index(name) for name in wanted])
        if sorted(numbers) != list(range(len(names))):
            raise BaguaError("Rank 0 told an order of gradients that does not fit this rank's parameters. [BG603]")
        self.arrival = [names[number] for number in numbers]
        # In elastic islands a thread enters for ranks that are still in their pass: they hear of no repeat.
        all_know = not self._session.elastic or self._session.membership.island_size == 1
        if self.arrival == list(by_name) and not self._anew and all_know:
            return None
        self._tensors = [by_name[name] for name in self.arrival]
        self._anew = False
        self.release()
        self._fill(self._layouts())
        return self.gradient_buckets

    def follow_alone(self, arrival: list[str], cuts: list[list[str]]) -> None:
        """Takes the order and the cuts that others have, and which don't make theirs when ``make`` is called next.
        Called on a newcomer."""
        self.arrival, self.wanted_cuts, self._alone = list(arrival), cuts, True

    @property
    def cuts(self) -> list[list[str]]:
        """Names of parameters, bucket by bucket, as they are cut now."""
        return [list(bucket.names) for bucket in self.buckets]

    @property
    def may_be_cut(self) -> bool:
        """True if ``cut`` may be called now, the same on all ranks: the order of arrival is known, and nothing is under
        way."""
        under_way = any(bucket.execution.started for bucket in self.buckets)
        steady = (self._follows_arrival and not self.wants_arrival()) or self._algorithm.exchanged == WEIGHT
        return self._algorithm.recuts and self._algorithm.waits and self._guest.idle and steady and not under_way

    def in_order(self) -> list[torch.Tensor]:
        """Tensors in the order of buckets."""
        return list(self._tensors)

    def names_of(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[list[str]]:
        return [[self._name(tensor) for tensor in group] for group in groups]

    def cut(self, cuts: Sequence[Sequence[str]]) -> None:
        """Makes all buckets again, so cut, without communication. What they held is gone: see ``rebucket.py``.

        Raises ValueError if these are not the names of all parameters that are exchanged."""
        by_name = {self._name(tensor): tensor for tensor in self._tensors}
        wanted = [name for names in cuts for name in names]
        if sorted(wanted) != sorted(self._name(tensor) for bucket in self.buckets for tensor in bucket.tensors):
            raise ValueError("Cuts must name each parameter that is exchanged once.")
        # Tensors that are in no bucket, being empty.
        rest = [tensor for name, tensor in by_name.items() if name not in set(wanted)]
        self._tensors = [*(by_name[name] for name in wanted), *rest]
        self.arrival = [self._name(tensor) for tensor in self._tensors] if self._follows_arrival else []
        self.wanted_cuts = [list(names) for names in cuts]
        self.release()
        self._runner.give_own_again()
        alone, self._alone = self._alone, True  # no messages: all ranks have been told the cuts
        try:
            self._fill(self._layouts())
        finally:
            self._alone = alone

    def _of_rank_0(self, numbers: list[int]) -> list[int]:
        """The numbers that rank 0 passes; as many on all ranks, whichever shards they hold."""
        told = torch.tensor(numbers, device="cpu")
        self._runner.voters.broadcast(told, 0)
        return told.tolist()

    def compare_starts(self) -> None:
        """Tells all ranks how often this one has started each bucket. Called before ``level_out``."""
        starts = torch.tensor([run.starts for run in self._runs], device="cpu")
        self._runner.everyone.allreduce_inplace(starts, ReduceOp.MAX)
        self._most = self._session.membership.generation, starts.tolist()

    def level_out(self) -> None:
        """Starts every bucket as often as it has been on other ranks; does nothing if members have changed since all
        told how often, because nobody waits for anything then."""
        generation, most = self._most
        if generation == self._session.membership.generation:
            for run, starts in zip(self._runs, most, strict=True):
                run.catch_up(starts)

    def run_as_often(self) -> None:
        """Runs each bucket to its end until it has been started as often as on the rank that is ahead. Called after
        ``compare_starts``."""
        for bucket, most in zip(self.buckets, self._most[1], strict=True):
            for _ in range(most - bucket.execution.starts):
                bucket.start()
                bucket.join()

    @property
    def _runs(self) -> list[Execution]:
        return [bucket.execution for bucket in self.buckets if not isinstance(bucket.execution, NotReady)]

    def release(self) -> None:
        """Gives the memory back."""
        for bucket in self.buckets:
            bucket.release()
        self.buckets = []
        self._guest.forget()

    def _name(self, tensor: torch.Tensor) -> str:
        name: str | None = self._names.get(tensor) or self._guest.name_of(tensor)
        if name is None:
            raise BaguaError(
                f"{type(self._algorithm).__name__} exchanges a tensor {list(tensor.shape)} that is no trainable "
                "parameter of the model: take tensors from ddp.bagua_build_params(). [BG306]"
            )
        return name

    def _groups(self) -> list[list[torch.Tensor]]:
        by_name = {self._name(tensor): tensor for tensor in self._tensors}
        wanted = [name for names in self.wanted_cuts for name in names]
        # Cuts that do not fit, of another program, are no cuts.
        if self.wanted_cuts and len(wanted) == len(by_name) and all(name in by_name for name in wanted):
            return [[by_name[name] for name in names] for names in self.wanted_cuts]
        return self.default_groups()

    def default_groups(self) -> list[list[torch.Tensor]]:
        """Groups tensors by their bytes."""
        total = sum(even_share(tensor) * tensor.element_size() for tensor in self._tensors)
        size = self._ddp.bucket_bytes or environment.get_default_bucket_size()
        explicit = self._ddp.bucket_bytes is not None or "BAGUA_DEFAULT_BUCKET_SIZE" in os.environ
        on_device = self._runner.on_device
        limit = bucket_bytes(total, size, explicit, on_device)
        return group_tensors(self._tensors, limit, filled=on_device and not explicit)

    def _layouts(self) -> list[BucketLayout | PlanBucket]:
        groups = self._groups()
        found: Sequence[Any] = self._algorithm.tensors_to_buckets(groups, self._ddp.gradient_as_bucket_view)
        layouts = self._guest.layouts(found, self._ddp.gradient_as_bucket_view)
        parts = [part for layout in layouts for part in _of_one_kind(layout)]
        if self._algorithm.exchanged == WEIGHT:  # nothing to send
            parts = [part for part in parts if any(tensor.numel() for tensor in part.tensors)]
        return parts

    def _bytes_needed(self, layout: BucketLayout | PlanBucket) -> int:
        """Shared memory, in whole pages, for a bucket of this layout, without the algorithm's slots."""
        if isinstance(layout, PlanBucket):
            return layout.elements * layout.dtype.itemsize
        weights = self._algorithm.exchanged == WEIGHT
        tensors = layout.tensors
        elements = sum(tensor.numel() for tensor in tensors) if weights else elements_needed(tensors)
        return -(-elements * tensors[0].element_size() // mmap.PAGESIZE) * mmap.PAGESIZE

    def _bucket(self, layout: BucketLayout | PlanBucket) -> PlanBucket:
        if isinstance(layout, PlanBucket):
            return layout
        parameters = [(self._name(tensor), tensor) for tensor in layout.tensors]
        if self._algorithm.exchanged == WEIGHT:
            return self._guest.weight_bucket(layout.name, parameters, self._runner.allocate)
        return self._guest.gradient_bucket(layout.name, parameters, self._runner.allocate)

    def _fill(self, layouts: Sequence[BucketLayout | PlanBucket]) -> None:
        with self._together():
            for layout in layouts:
                self.buckets.append(self._bucket(layout))
            self._guest.adopt(self.buckets)
        with self._together():  # in two parts: plans are made when all ranks have memory
            for bucket in self.buckets:
                self._algorithm.init_operations(self._ddp, bucket)
                self._runner.adopt(bucket)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Marks a block after which, if it fails on one rank, all give their memory back and raise."""
        if self._alone:
            yield
            return
        mistake: Exception | None = None
        try:
            yield
        except Exception as error:
            mistake = error
        try:
            raise_together(mistake, self._runner.voters)
        except Exception:
            self.release()  # memory of ranks that succeeded goes back, too
            raise


def _of_one_kind(layout: BucketLayout | PlanBucket) -> list[BucketLayout | PlanBucket]:
    """The layout itself, or one for each dtype in it, in the order of first occurrence, and for each way of dividing
    parameters: codecs give ranks of an island that hold the same part the same bits only where they hold the same
    bucket. Raises BaguaError for an empty one."""
    if isinstance(layout, PlanBucket):
        return [layout]
    if not isinstance(layout, BucketLayout) or not layout.tensors:
        raise BaguaError(
            f"tensors_to_buckets returned {layout!r}: each item must be a BucketLayout with tensors. [BG306]"
        )
    by_kind: dict[tuple[torch.dtype, str], list[torch.Tensor]] = {}  # a bucket is one tensor
    for tensor in layout.tensors:
        by_kind.setdefault((tensor.dtype, division_words(tensor)), []).append(tensor)
    if len(by_kind) == 1:
        return [layout]
    return [
        BucketLayout(f"{layout.name} {str(dtype).removeprefix('torch.')}{divided}", tuple(tensors))
        for (dtype, divided), tensors in by_kind.items()
    ]
