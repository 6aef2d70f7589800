"""torch's ``DistributedSampler`` in elastic jobs. It shares out each epoch among the ranks that are there when it
begins. Samples that a lost rank had not trained on come first in the next epoch.

All ranks must take as many batches, so all must change at the same epoch. A rank may begin one before it hears of a
loss of which another one has heard by then. So ranks tell each other, when members change, how many epochs of each
sampler they have begun: those count as begun by all, and have the old shares.
"""

from __future__ import annotations

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, cycle, islice
from typing import Any

from torch.utils.data import DistributedSampler

from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.comm.step_state import Heard
from bagua.torch_api.job.session import CURRENT, Session

LOG = logging.getLogger("bagua")
Members = tuple[int, ...]  # in the order of their ranks


def follow(session: Session) -> None:
    """Samplers of torch follow the members of this session, if it is elastic. Idempotent."""
    if session.elastic:
        session.keep(TorchSamplers)


def share_out(sampler: DistributedSampler[Any], ranks: int, rank: int) -> None:
    """Shares the sampler's next epoch out among so many ranks."""
    epoch = sampler.epoch
    # torch computes lengths in ``__init__``; it sets the epoch back to 0.
    make = getattr(DistributedSampler.__init__, "__wrapped__", DistributedSampler.__init__)  # also for lost ranks
    make(sampler, sampler.dataset, ranks, rank, sampler.shuffle, sampler.seed, sampler.drop_last)
    sampler.epoch = epoch


@dataclass
class Course:
    """Progress of one sampler: ``begun`` epochs, of which the last has had ``steps`` training steps."""

    members: Members
    begun: int = 0
    steps: int = 0
    over: int | None = None  # steps of the epoch that was begun last when all its samples had been asked for
    passed: int | None = None  # steps of it when another sampler began an epoch
    number: int = 0  # of that epoch, for the sampler: its order follows from that
    opening: list[int] = field(default_factory=list)  # samples of earlier epochs that open it, of all ranks
    changes: list[tuple[int, Members]] = field(default_factory=list)  # after so many epochs there are other members
    lost: list[tuple[int, int, int]] = field(default_factory=list)  # (epoch, rank, its steps in that)

    def at(self, epoch: int) -> Members:
        """The members that share out this epoch, counted from 1."""
        # The newest change before that epoch.
        return next((members for after, members in reversed(self.changes) if after < epoch), self.members)

    def to_json(self) -> dict[str, Any]:
        """Returns all of it in JSON's types."""
        return asdict(self)

    def change(self, told: Sequence[Mapping[str, Any]], members: Members, new: bool) -> bool:
        """Hears the courses of others; ``new``: this member takes over the one that is furthest. True if a rank was
        lost in an epoch."""
        first = max(told, key=lambda one: (one["begun"], one["steps"]), default=None)
        epoch, steps = (first["begun"], first["steps"]) if first is not None else (0, 0)
        if new and first is not None:
            self.begun, self.steps, self.over, self.passed = epoch, steps, first["over"], first["passed"]
            self.number, self.opening, self.members = first["number"], first["opening"], tuple(first["members"])
            self.changes = [(after, tuple(one)) for after, one in first["changes"]]
            self.lost = [(one, rank, count) for one, rank, count in first["lost"]]
        known = {rank for one, rank, _ in self.lost if one == epoch}
        gone = [rank for rank, one in enumerate(self.at(epoch)) if one not in members and rank not in known]
        if epoch:  # nothing was lost where no epoch had begun
            self.lost += [(epoch, rank, steps) for rank in gone]
        self.changes.append((epoch, members))
        return bool(gone and epoch)

    @property
    def trains(self) -> bool:
        """True if the epoch that was begun last is one of training. In a validation there are no steps. In a training
        there may be none before all samples have been asked for: worker processes load ahead."""
        return self.steps > 0 and (self.over != 0 or bool(self.passed))


class TorchSamplers:
    """The samplers of one session (a ``Follower``)."""

    given = 0  # batches are not counted: see ``Course.steps``

    def __init__(self, session: Session) -> None:
        self._session = session
        self._members = _members(session)
        self._courses: list[Course] = []
        self._of: weakref.WeakKeyDictionary[DistributedSampler[Any], Course] = weakref.WeakKeyDictionary()
        self._heard: list[tuple[list[list[Mapping[str, Any]]], Members, bool]] = []
        self._told = False
        units(session).followers.add("samplers of torch", self)
        _install()

    def course(self, sampler: DistributedSampler[Any]) -> Course | None:
        """The course of this sampler. None for one that shares out among others than all ranks."""
        return self._of.get(sampler) or self._adopt(sampler)

    def share_out_next(self, sampler: DistributedSampler[Any], course: Course) -> tuple[list[int], list[int]]:
        """Shares out the epoch that comes next. Returns what opens this rank's part of it, and that of all ranks."""
        members, missed = course.at(course.begun + 1), self._missed(sampler, course)
        ranks, rank = len(members), members.index(self._session.membership.member)
        share_out(sampler, ranks, rank)
        return _part(missed, ranks, rank, sampler.drop_last), missed

    def begin_epoch(self, sampler: DistributedSampler[Any], course: Course) -> list[int]:
        """Begins an epoch. Returns what opens this rank's part of it."""
        own, course.opening = self.share_out_next(sampler, course)
        course.begun, course.steps, course.number = course.begun + 1, 0, sampler.epoch
        course.over = course.passed = None
        for other in self._courses:
            if other is not course and other.passed is None:
                other.passed = other.steps
        course.lost = [one for one in course.lost if one[0] >= course.begun]
        return own

    def _missed(self, sampler: DistributedSampler[Any], course: Course) -> list[int]:
        """Samples of lost ranks in the epoch before, as far as they were not trained on."""
        missed: list[int] = []
        for epoch, rank, steps in course.lost:
            if epoch == course.begun and course.trains:  # a validation trains on nothing, so it misses nothing
                # A copy: the sampler itself shares out the next epoch.
                theirs, ranks = copy.copy(sampler), len(course.at(epoch))
                theirs.epoch = course.number
                share_out(theirs, ranks, rank)
                part = [*_part(course.opening, ranks, rank, sampler.drop_last), *_ITERATE(theirs)]
                missed += part[len(part) * steps // course.steps :]  # a part was trained on as far as its steps go
        return missed

    def _adopt(self, sampler: DistributedSampler[Any]) -> Course | None:
        own = self._session.membership.member
        places = [self._members, *(members for _, members, _ in self._heard)]
        # A sampler that shares out among some of the ranks is the program's own matter.
        if (sampler.num_replicas, sampler.rank) not in [
            (len(members), members.index(own)) for members in places if own in members
        ]:
            return None
        course, number = Course(self._members), len(self._courses)
        for told, members, new in self._heard:
            # Changes that came before the program made it.
            course.change([one[number] for one in told if len(one) > number], members, new)
        self._courses.append(course)
        self._of[sampler] = course
        return course

    # Changes of membership: see ``Follower``

    def describe(self) -> Any:
        return {}

    def check(self, ranks: int) -> None:
        """Accepts any number of ranks."""

    def commit(self) -> None:
        for course in self._courses:
            course.steps += 1

    def tell(self) -> dict[str, Any]:
        return {"courses": [course.to_json() for course in self._courses]}

    def hear(self, told: Heard, members: Sequence[int], generation: int) -> float:
        courses = [state["courses"] for _, state in told.values()]
        new = self._session.membership.member not in told
        self._heard.append((courses, tuple(members), new))
        lost = [
            course.change([one[number] for one in courses if len(one) > number], tuple(members), new)
            for number, course in enumerate(self._courses)
        ]
        # One rank says it for all, once.
        if any(lost) and not self._told and self._session.membership.rank == min(self._session.membership.active):
            self._told = True
            LOG.warning(
                "A rank was lost in an epoch of torch's DistributedSampler. What it has not trained on comes first in "
                "the next epoch, and is missed if there is none. bagua.contrib.ElasticSampler gives it to the others "
                "in the same epoch: sampler = bagua.contrib.ElasticSampler(dataset, batch_size=32); loader = "
                "sampler.loader(); for epoch in sampler.epochs(10): ..."
            )
        return 1.0


def _part(samples: Sequence[int], ranks: int, rank: int, drop_last: bool) -> list[int]:
    """A rank's part, as large as that of any other: as a sampler makes it."""
    size = len(samples) // ranks * ranks if drop_last else -(-len(samples) // ranks) * ranks
    return list(islice(cycle(samples), size))[rank::ranks]


def _members(session: Session) -> Members:
    membership = session.membership
    return tuple(membership.members[rank] for rank in membership.active)


_ITERATE: Callable[[DistributedSampler[Any]], Iterator[Any]] = DistributedSampler.__iter__
_SET_EPOCH = DistributedSampler.set_epoch


def _install() -> None:
    """Samplers ask the session, wherever a program makes them."""
    if DistributedSampler.__iter__ is _ITERATE:  # once in a process: sessions may follow each other
        DistributedSampler.__iter__ = _iterate  # type: ignore[method-assign]
        DistributedSampler.set_epoch = _set_epoch  # type: ignore[method-assign, assignment]


def _of_session(sampler: DistributedSampler[Any]) -> tuple[TorchSamplers, Course] | None:
    session = CURRENT.session
    # A worker of a DataLoader, or another child, is no rank.
    if session is None or not session.elastic or session.pid != os.getpid():
        return None
    samplers = session.keep(TorchSamplers)
    course = samplers.course(sampler)
    return None if course is None else (samplers, course)


def _iterate(sampler: DistributedSampler[Any]) -> Iterator[Any]:
    found = _of_session(sampler)
    if found is None:
        return _ITERATE(sampler)
    samplers, course = found
    opening = samplers.begin_epoch(sampler, course)
    rest = _ITERATE(sampler)  # here, and not in the generator, whose body runs at the first sample
    sampler.num_samples += len(opening)  # for len(): torch compares its own part with it
    return _walk(course, course.begun, chain(opening, rest))


def _walk(course: Course, epoch: int, samples: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from samples
    finally:
        if course.begun == epoch and course.over is None:
            course.over = course.steps


def _set_epoch(sampler: DistributedSampler[Any], epoch: int) -> None:
    _SET_EPOCH(sampler, epoch)
    if (found := _of_session(sampler)) is not None:
        opening, _ = found[0].share_out_next(sampler, found[1])
        sampler.num_samples += len(opening)  # for len(): loops ask for it before they iterate
