"""Runs the units of an elastic job: exchanges that are repeated when members were lost (``commit.py`` has the rule)."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.commit import Ledger
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.transfer import ReduceOp, transfer
from bagua.torch_api.join.connection import Regrouped
from bagua.torch_api.join.session import Session, current

LOG = logging.getLogger("bagua")
T = TypeVar("T")


class MembershipChange(NamedTuple):
    """A change of membership, told to a program. ``previous_world_size``: when it was told last, or joined the job."""

    generation: int
    rank: int
    world_size: int
    previous_world_size: int


OnChange = Callable[[MembershipChange], object]


class Follower(Protocol):
    """State that is the same for all members, and goes on with each committed training step: a sampler's.

    ``given``: batches that this member was given and has not committed.
    """

    given: int

    def commit(self) -> None:
        """A training step was committed."""
        ...

    def tell(self) -> dict[str, Any]:
        """State for the other members, in JSON's types."""
        ...

    def hear(self, told: Sequence[Mapping[str, Any]], members: Sequence[int], generation: int) -> None:
        """Takes in the states of all members that have one, in a generation of ``members``."""
        ...


def nothing() -> None:
    """There is nothing to be undone, or to be shown."""


class Units:
    """Those of one session. One at a time: what a unit calls is part of it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ledger = Ledger()
        self._thread = 0  # that runs a unit now
        self._flags = torch.zeros(
            2, dtype=torch.int32
        )  # the most batches of a member in this step, and minus the least
        self._followers: dict[str, Follower] = {}
        self._followers_told: dict[str, list[Mapping[str, Any]]] = {}  # in the present generation
        self._heard_in = session.membership.generation
        self._told_of = session.membership
        self._exchanged: dict[int, int] = {}  # by scope: the last generation in which one was exchanged
        self.on_change: list[OnChange] = []
        session.end_first(self, self._leave)

    @property
    def inside(self) -> bool:
        """Whether this thread runs a unit now."""
        return self._thread == threading.get_ident()

    def run(
        self,
        scope: int,
        members: Callable[[], Members],
        attempt: Callable[[], T],
        again: Callable[[], None] = nothing,
        commit: Callable[[], None] = nothing,
    ) -> T:
        """Runs ``attempt`` until it is whole on all members of the present generation; then ``commit``, once. Returns
        what ``attempt`` returned.

        ``attempt`` communicates, and leaves the old values as they are. ``again`` is called before it is tried once
        more. ``commit`` puts the results in their place. ``scope``: number of the communicator in whose order it goes.
        ``members``: who takes part, asked when ``attempt`` is over.
        """
        if self.inside:
            found = attempt()
            commit()
            return found
        self._thread = threading.get_ident()
        try:
            while True:
                generation = self._session.membership.generation
                try:
                    found = attempt()
                    self._ledger.set_ready(scope)
                    self._exchange_flags(members())
                    self._exchanged[scope] = generation
                    break
                except Regrouped:
                    self.recover(generation)
                    if self._ledger.must_commit(scope):
                        break
                    self._ledger.set_unready(scope)
                    again()
            self._ledger.commit(scope)
            commit()
        finally:
            self._thread = 0
        if self._told_of is not self._session.membership:
            self.tell_program()
        return found

    def exchanged_in(self, scope: int) -> bool:
        """Whether a unit of this scope has been exchanged in the present generation."""
        return self._exchanged.get(scope) == self._session.membership.generation

    def end(self, scope: int) -> None:
        """No unit of this scope will come."""
        self._ledger.end(scope)
        self._exchanged.pop(scope, None)

    def recover(self, generation: int) -> None:
        """After Regrouped in ``generation``: enters the next one, where that has not been done since, and hears
        how far all members are. Raises CommunicationError when the job is over."""
        while True:
            try:
                if self._session.membership.generation == generation:
                    self._session.enter()
                if self._heard_in != self._session.membership.generation:
                    self._hear()
                return
            except Regrouped as error:  # somebody was lost meanwhile
                LOG.debug("Generation %d ended: %s", self._session.membership.generation, error)
                generation = self._session.membership.generation

    def _leave(self) -> None:
        """Ranks leave together: one that has seen the end of the last unit, and is gone, could not tell the others."""
        self.run(0, self._world, nothing)

    def _world(self) -> Members:
        membership = self._session.membership
        return Members(0, range(membership.world_size), membership.rank)

    def _exchange_flags(self, members: Members) -> None:
        """Over when all members have called it: their results are whole, too."""
        given = sum(follower.given for follower in self._followers.values())
        self._flags[0], self._flags[1] = given, -given
        if members.nranks() > 1:
            transfer(self._session, "allreduce", self._flags, self._flags, 2, members, op=ReduceOp.MAX, together=True)

    def follow(self, name: str, follower: Follower) -> None:
        """From now on ``follower`` goes on with each training step, and agrees with its like on other members when
        they change. All members do it in the same order."""
        name = f"{name} {len(self._followers)}"
        self._followers[name] = follower
        if name in self._followers_told:  # others have had it before the members changed
            membership = self._session.membership
            follower.hear(self._followers_told[name], membership.members, membership.generation)

    def step_committed(self) -> None:
        """A training step was committed. Raises BaguaError, on all members, if they took different numbers of batches
        for it."""
        most, least = int(self._flags[0]), -int(self._flags[1])
        self._flags.zero_()
        for follower in self._followers.values():
            follower.commit()
        if most != least:
            raise BaguaError(
                f"Ranks took {least} to {most} batches of their ElasticSamplers for one training step: all take as "
                "many. A batch counts for the step that follows."
            )

    def _hear(self) -> None:
        membership = self._session.membership
        state = {name: follower.tell() for name, follower in self._followers.items()}
        told = json.dumps({"units": self._ledger.tell().hex(), "followers": state}).encode()
        lengths = [int.from_bytes(one, "little") for one in self._gather(len(told).to_bytes(8, "little"))]
        rows = self._gather(told.ljust(max(lengths), b"\0"))
        heard = [json.loads(row[:length]) for row, length in zip(rows, lengths, strict=True)]
        self._ledger.hear(bytes.fromhex(one["units"]) for one in heard)
        names = dict.fromkeys(name for one in heard for name in one["followers"])
        self._followers_told = {
            name: [one["followers"][name] for one in heard if name in one["followers"]] for name in names
        }
        for name, follower in self._followers.items():
            follower.hear(self._followers_told[name], membership.members, membership.generation)
        self._heard_in = membership.generation
        LOG.info("Generation %d: rank %d of %d.", membership.generation, membership.rank, membership.world_size)

    def _gather(self, data: bytes) -> list[bytes]:
        """Equally long bytes of every rank."""
        world = self._world()
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        everyone = torch.empty(world.nranks(), len(data), dtype=torch.uint8)
        transfer(self._session, "allgather", mine, everyone, len(data), world, recv_rows=world.nranks())
        return [bytes(row.tolist()) for row in everyone]

    def tell_program(self) -> None:
        """Members have changed, and what the program exchanged has been committed."""
        before, now = self._told_of, self._session.membership
        self._told_of = now
        change = MembershipChange(now.generation, now.rank, now.world_size, before.world_size)
        for function in list(self.on_change):
            function(change)


def units(session: Session) -> Units:
    """Those of this session, the same object each time."""
    return session.keep(Units)


def on_membership_change(function: OnChange) -> OnChange:
    """``function(change)`` is called in the thread that communicates, each time the members of an elastic job have
    changed: at the end of the exchange that met the change, on each rank. ``change``: ``MembershipChange``.

    It must not communicate: ranks come to it at different moments. What it raises reaches the caller of the exchange.
    Returns ``function``, so that it may be used as a decorator.
    """
    units(current()).on_change.append(function)
    return function
