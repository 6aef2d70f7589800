"""Makes a session's communicators, and gives them numbers on which their members agree without a message."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from bagua.base.errors import MembershipChanged
from bagua.torch_api.comm.admission import Carrier
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.comm.communicator import WORLD, Comm, Communicator
from bagua.torch_api.comm.elastic import ElasticCommunicator, ElasticWorld
from bagua.torch_api.comm.members import hashed_number
from bagua.torch_api.job.connection import Regrouped
from bagua.torch_api.job.session import CURRENT, Session, current


class Holder(Protocol):
    """Holds communicators that it has made."""

    def take_back(self, made: Collection[Communicator]) -> None:
        """Forgets these communicators: they are to be asked for again."""
        ...


class _Drawn(threading.local):
    """Numbers that this thread has drawn in its unit since the last mark: keys of counts, and communicators made."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.made: list[weakref.ref[Communicator]] = []


class Communicators(Carrier):
    """Makes the communicators of one session. ``world``: all ranks of the job.

    ``shrinks``: in an elastic job the communicator goes on without members that are lost. ``grows``: newcomers become
    members. Keys that follow from ranks have their member numbers, which don't change.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection = session.connection
        self._growing: weakref.WeakSet[Communicator] = weakref.WeakSet()
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._drawn = _Drawn()
        self._taken_back: dict[int, Communicator] = {}  # by number: see ``rewind``
        if session.elastic:
            session.renew_with(self)  # before all communicators
        self.world = self.attach(0, range(session.membership.world_size), shrinks=True, grows=True)
        self._world_ids = 0
        self._counts: Counter[str] = Counter()
        if session.elastic:
            units(session).part = self.part
            units(session).admission.carry("communicators", self)

    def numbers(self, ranks: Sequence[int]) -> list[int]:
        """Member numbers of these ranks."""
        members = self._session.membership.members
        return [members[rank] for rank in ranks]

    def new(self, ranks: Sequence[int]) -> Communicator:
        """A communicator of its own for ``ranks`` (global, this one among them). All members must make theirs in the
        same order; operations on different communicators need not be in the same order on all ranks."""
        members = sorted(ranks)
        if tuple(members) == self.world.ranks:
            return self.attach(self.next_world_id(), members, counted=True)
        numbers = self.numbers(members)
        return self.make(f"{numbers} {self.count(str(numbers))}", members, counted=True)

    def make(self, key: str, members: Sequence[int], *, shrinks: bool = False, counted: bool = False) -> Communicator:
        """A communicator of some of the ranks whose number follows from ``key``, which its members choose alike and
        nobody chooses again. ``counted``: there is a ``count`` in it. Raises CommunicationError if another one has the
        same number, as one in two thousand million pairs does."""
        return self.attach(hashed_number(key), members, shrinks=shrinks, counted=counted)

    def attach(
        self,
        id: int,
        members: Sequence[int],
        *,
        shrinks: bool = False,
        grows: bool = False,
        place: int | None = None,
        counted: bool = False,
    ) -> Communicator:
        """Returns this rank's end of communicator ``id``. ``place``: newcomers at this position of their islands
        become members. ``counted``: the number was drawn just now, and a repeat draws it again."""
        session = self._session
        if not session.elastic:
            return Communicator(id, members, session.membership.rank, self._connection)
        made = self._taken_back.pop(id, None) if counted else None
        if made is not None and not made.is_alike(members, shrinks, grows, place):
            made.destroy()  # before its number is another's
            made = None
        if made is None:
            made = self._attach_elastic(id, members, shrinks, grows)
            made.place = place
            session.renew_with(made)
            if grows:
                self._growing.add(made)
        if counted and units(session).inside:  # nothing else is repeated
            self._drawn.made.append(weakref.ref(made))
        return made

    def part(self) -> None:
        """Newcomers are about to be let into the present generation: communicators that they are missing in are made
        again, with them."""
        for one in self._growing:
            one.part()

    def _attach_elastic(self, id: int, members: Sequence[int], shrinks: bool, grows: bool) -> ElasticCommunicator:
        """Repeats it in the next generation if this one has ended. Raises Regrouped instead in a unit, and where an
        exchange begins at a moment of its own: what follows belongs to this generation. Raises MembershipChanged if a
        member was lost that it can't go on without."""
        session, running = self._session, units(self._session)
        numbers = self.numbers(members)
        while True:
            present = session.membership
            ranks = [rank for rank, member in enumerate(present.members) if member in numbers]
            if len(ranks) < len(numbers) and not shrinks:
                lost = sorted(set(numbers) - set(present.members))
                raise MembershipChanged(
                    f"Members {lost} were lost: make a new group of the ranks that are left. [BG508]"
                )
            try:
                made = ElasticCommunicator if id else ElasticWorld
                return made(id, ranks, present.rank, self._connection, running, shrinks, grows)
            except Regrouped:
                if running.inside or self._connection.is_steady:
                    raise
                running.recover(present.generation)

    # See ``Carrier``: newcomers give the same numbers as the others from now on.

    def give(self, tensors: list[torch.Tensor]) -> int:
        """Returns the count of numbers given to communicators of all ranks."""
        return self._world_ids

    def take(self, document: int, tensors: list[torch.Tensor]) -> None:
        """From now on all other members are in those of all ranks."""
        self._world_ids = document
        for one in self._growing:
            one.renew_ranks()

    def mark(self) -> int:
        """A point of this thread's to which it may ``rewind``, until it sets another one."""
        self._drawn.keys.clear()
        self._drawn.made.clear()
        return self._world_ids

    def rewind(self, mark: int) -> None:
        """Numbers that this thread has drawn since ``mark`` are drawn again: all ranks do again what took them, and
        some had got further. Their communicators are taken back. Whoever draws such a number next gets the same one,
        which the daemon knows, in this generation."""
        self._world_ids = mark
        self._counts.subtract(self._drawn.keys)
        taken = [one for one in (made() for made in self._drawn.made) if one is not None]
        self.mark()
        self._taken_back |= {one.id: one for one in taken}
        for holder in list(self.holders) if taken else ():
            holder.take_back(taken)

    def renew(self) -> None:
        """In a new generation: ends those that were taken back and not asked for again, before they are made there."""
        while self._taken_back:
            self._taken_back.popitem()[1].destroy()

    def next_world_id(self, place: int | None = None) -> int:
        """The number of the next communicator of all ranks. All take it in the same order. The first fifteen are
        quicker than others: see csrc/core/channel/layout.h. ``place``: of the ranks at this position of each island;
        these communicators have numbers in a row."""
        first = self._world_ids + 1
        self._world_ids += 1 if place is None else self._session.membership.island_size
        return first + (place or 0)

    def count(self, key: str) -> int:
        """Returns how often this key was asked for before."""
        self._counts[key] += 1
        if self._session.elastic and units(self._session).inside:
            self._drawn.keys.append(key)
        return self._counts[key] - 1


def communicators(session: Session) -> Communicators:
    """Returns the object of this session."""
    return session.keep(Communicators)


def communicator_of(comm: Comm) -> Communicator:
    """The communicator that ``comm`` of a primitive stands for. Raises TypeError for anything else, BaguaError before
    ``init_process_group``."""
    if isinstance(comm, Communicator):
        return comm
    if comm is not None and comm is not WORLD:
        raise TypeError(f"comm is a {type(comm).__name__}: pass a communicator, or None for all ranks. [BG406]")
    return (CURRENT.session or current()).keep(Communicators).world  # the primitive itself checks the session
