"""Loads the batches of an ``ElasticSampler``, ahead of time too, and tells the sampler which of them it gives out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.utils.data import DataLoader

from bagua.torch_api.data.epoch_progress import Course


class ElasticLoader:
    """Loader of this rank's batches. One iteration gives them out until the epoch ends. Worker processes load ahead.
    After a change of membership, batches that were loaded for a share that is no more are thrown away, and others are
    loaded.
    """

    def __init__(
        self,
        course: Course,
        dataset: Any,
        given: Callable[[float], object],
        options: dict[str, Any],
        over: Callable[[], object] = lambda: None,
        between_steps: Callable[[], object] = lambda: None,
        calm: AbstractContextManager[object] = nullcontext(),
    ) -> None:
        """``given``: is called when a batch is given out, with its samples divided by the mean of all ranks' batches.
        ``over``: when an iteration ends, or is left. ``between_steps``: before a batch is given out.
        ``calm``: inside it no other thread of this rank changes the course.
        ``options``: for ``torch.utils.data.DataLoader``."""
        self._course = course
        self._given = given
        self._over = over
        self._between_steps = between_steps
        self._calm = calm
        self._ahead = _Ahead(course)
        self._loading: Iterator[Any] | None = None
        self._loader = DataLoader(dataset, batch_sampler=self._ahead, **options)

    def __len__(self) -> int:
        """Batches that are left of this epoch, if the membership stays."""
        return self._course.left

    @property
    def steps_of_epoch(self) -> int:
        """Batches of this rank in a whole epoch, with the present members."""
        return self._course.steps_of_epoch

    @property
    def is_steady(self) -> bool:
        """True if ``steps_of_epoch`` stays the same when members come and go."""
        return self._course.setting.global_batch is not None

    @property
    def per_island(self) -> bool:
        """True if all ranks of an island get the same batches."""
        return self._course.setting.per_island

    def stream(self) -> Iterator[Any]:
        """Batches of this rank, epoch after epoch, without an end. For loops that count epochs by themselves, and don't
        ask ``ElasticSampler.epochs``: a newcomer is let in at its first batch."""
        while True:
            yield from self

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches()
        finally:
            self._loading = None  # workers of an iteration that was left end with it
            with self._calm:
                self._over()

    def _batches(self) -> Iterator[Any]:
        course, epoch = self._course, self._course.epoch
        while True:
            self._between_steps()
            with self._calm:
                if course.epoch != epoch:  # another thread, or ``epochs``, has ended the epoch
                    return
                if course.batch() is None:
                    course.end_epoch()
                    return
                loaded = self._load()
                self._given(course.give())
            yield loaded

    def _load(self) -> Any:
        """The next batch of this rank. There is one."""
        while True:
            if self._loading is None:
                self._ahead.clear()  # a new iteration of the DataLoader begins with the batch that comes next
                self._loading = iter(self._loader)
            try:
                loaded = next(self._loading)
            except StopIteration:  # all that there was when it began; others have given samples back since
                self._loading = None
                continue
            if self._ahead.arrived():
                return loaded


class _Ahead:
    """The batches that a ``DataLoader`` asks for: the next ones of this rank, as they are at that moment."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._asked: deque[list[int]] = deque()  # and not arrived; the first ``_outdated`` of them for another share
        self.clear()

    def clear(self) -> None:
        """Forgets all that was asked for."""
        self._asked.clear()
        self._outdated, self._version, self._epoch = 0, self._course.version, self._course.epoch

    def arrived(self) -> bool:
        """The oldest batch that was asked for has been loaded. False: it is not the next one any more."""
        self._look()  # membership may have changed while workers loaded
        self._asked.popleft()
        if not self._outdated:
            return True
        self._outdated -= 1
        return False

    def _look(self) -> None:
        if self._version != self._course.version:
            # Batches that are on their way were asked for with the shares of before.
            self._version = self._course.version
            self._outdated = len(self._asked)

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            self._look()
            if self._course.epoch != self._epoch:
                return
            # Batches on their way that still count come first.
            batch = self._course.batch(len(self._asked) - self._outdated)
            if batch is None:
                return
            self._asked.append(batch)
            yield batch
