"""Members of a communicator: their ranks, their number in the daemon, and how long that lives."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from bagua.base.errors import BaguaError, CommunicationError, MembershipChanged
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.job import environment
from bagua.torch_api.job.connection import Connection
from bagua.torch_api.job.daemon import Membership

ACTIVE_ALONE = 1 << 21  # no communicator that is counted gets so far
SUBGROUPS = 0x80000000
"""Numbers of communicators from here on are hashes of their members."""
TWINS = 1 << 22
DEVICES, NUMBERS = 4, 1 << 20  # of a rank, and of communicators, that have twins with numbers in a row


def hashed_number(key: str) -> int:
    """A number of a communicator that follows from ``key``."""
    digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
    return SUBGROUPS | int.from_bytes(digest, "big") & SUBGROUPS - 1  # a hash can't meet a counted number


def twin_number(number: int, device: int) -> int:
    """The same on all members, for the first, second, ... device with tensors of a communicator.

    Twins of communicators of all ranks, which are counted, lie below the numbers that the hierarchical route takes for
    itself. Twins of others have hashes: there is no such route for them.
    """
    if number < NUMBERS and device < DEVICES:
        return TWINS + device * NUMBERS + number
    return hashed_number(f"device twin {device} of {number}")


class Roster:
    """Members by the ``numbers`` that they keep for life, over the generations of an elastic job.

    ``shrinks``: they go on without members that were lost; otherwise ``lost`` are their numbers, and what they are
    members of can't be used any more. ``grows``: newcomers become members, too. ``place``: of islands, those at this
    position alone; None: all.
    """

    shrinks = grows = False
    place: int | None = None
    numbers: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    _lobby = False  # they are newcomers that were not let in

    def _enroll(self, membership: Membership, ranks: Sequence[int]) -> None:
        """Takes the members that have these ranks now."""
        self.numbers = tuple(membership.members[rank] for rank in ranks)
        self._lobby = membership.lobby

    def _check_whole(self, what: str, ranks: Sequence[int]) -> None:
        """Raises MembershipChanged if ``what`` these members have has lost some that it can't go on without."""
        if self.lost:
            lost = ", ".join(map(str, self.lost))
            raise MembershipChanged(
                f"The {what} of ranks {list(ranks)} has lost members: {lost}. Make a new group of the ranks that are "
                "left: all of them call new_group(). [BG508]"
            )

    def _follow(self, present: Membership) -> list[int]:
        """Returns the ranks of those that are left in a new generation."""
        if self.grows:
            self.numbers = tuple(present.members[rank] for rank in present.at_place(self.place))
        if self._lobby and not self.grows:
            self.lost = self.numbers
        elif not self.shrinks:
            self.lost = tuple(sorted(set(self.numbers) - set(present.members)))
        return [rank for rank, member in enumerate(present.members) if member in self.numbers]


class Members(Roster):
    """Positions (``rank()``, roots, peers) count from 0 in the order of ``ranks``, which are global numbers.

    One that a session made lives in the daemon until the last reference to it is gone, or ``destroy`` is called.
    Members may drop it at different moments. ``connection`` is None where somebody else looks after it.

    In an elastic job ``ranks`` are those of the present generation.
    """

    def __init__(self, id: int, ranks: Sequence[int], global_rank: int, connection: Connection | None = None) -> None:
        self.id = id
        self.ranks = tuple(ranks)
        self.connection = connection
        self.stream: torch.cuda.Stream | None = None  # of its group; None: the current one
        self._twins: dict[int, Members] = {}  # by device
        self._rank = self.ranks.index(global_rank) if global_rank in self.ranks else -1
        self._aborted = False
        self._destroy: weakref.finalize[..., Members] | None = None
        if connection is not None:
            self._enroll(connection.membership, self.ranks)
            if id != 0:  # number 0 is there from the start
                connection.create_comm(id, self.ranks)
                self._destroy_with_last_reference()

    def _destroy_with_last_reference(self) -> None:
        self._destroy = weakref.finalize(self, _destroy_quietly, self.connection, self.id)
        self._destroy.atexit = False  # the session's end is the communicators' end

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={list(self.ranks)}, rank={self._rank})"

    def rank(self) -> int:
        """Position of this process; -1 if it is no member."""
        return self._rank

    def nranks(self) -> int:
        return len(self.ranks)

    def device_id(self) -> int:
        """Number of this rank's device on its host: LOCAL_RANK."""
        return environment.get_local_rank()

    @property
    def cuda_stream(self) -> Any:
        """The CUDA stream in whose order it carries CUDA tensors: that of its group, else the current one; 0 where CUDA
        is not in use."""
        if self.stream is not None or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self.stream or 0
        return torch.cuda.current_stream()

    def twin(self, device: CudaConnection) -> Members:
        """The same ranks for operations of one device, with a number of their own. An operation of a GPU comes to the
        daemon later than it was submitted, and must not meet operations on this rank's CPU tensors. All members
        ask for the first time at the same point of their operations, and wait for each other."""
        found = self._twins.get(device.index)
        if found is None:
            number = twin_number(self.id, len(self._twins))
            # The device's connection, so that its operations have numbers of their own.
            found = self._twins[device.index] = Members(number, self.ranks, device.membership.rank, device)
        return found

    def renew(self) -> None:
        """In a new generation of the job: the members that are left, by their new ranks."""
        self.renew_ranks()  # twins were made for the old ranks: they are made again when asked for
        for twin in self._twins.values():
            twin.forget()
        self._twins.clear()
        if self._is_known() and not self.lost:
            assert self.connection is not None
            self.connection.create_comm(self.id, self.ranks)

    def forget(self) -> None:
        """Leaves the number to another communicator: this one ended with its generation."""
        if self._destroy is not None:
            self._destroy.detach()  # the number is not given back: another communicator has it then

    def _is_known(self) -> bool:
        """Returns True if the daemon is to know it."""
        return self._destroy is not None and self._destroy.alive

    @property
    def ended(self) -> bool:
        """True if it was given back to the daemon."""
        return self._destroy is not None and not self._destroy.alive

    def is_alike(self, ranks: Sequence[int], shrinks: bool, grows: bool, place: int | None) -> bool:
        """Returns True if it can be used in the place of a new one, of these ranks."""
        alike = (self.ranks, self.shrinks, self.grows, self.place) == (tuple(ranks), shrinks, grows, place)
        return alike and self._is_known() and not self._aborted and not self.lost

    def renew_ranks(self) -> None:
        """``renew`` without telling the daemon."""
        if self.connection is not None:
            present = self.connection.membership
            self.ranks = tuple(self._follow(present))
            self._rank = self.ranks.index(present.rank)

    def part(self) -> None:
        """Newcomers are about to be let into the present generation: it will be made again, with them."""
        if self._is_known():
            assert self.connection is not None
            self.connection.destroy_comm(self.id)

    def renumber(self, id: int) -> None:
        """Takes the number that it has on the other members. Called on a newcomer, before ``renew``."""
        self.id = id
        if self._destroy is not None:
            self._destroy.detach()
            self._destroy_with_last_reference()

    def destroy(self) -> None:
        """Gives it back to the daemon: this rank will not use it any more. Idempotent."""
        for twin in self._twins.values():
            twin.destroy()
        self._twins.clear()
        if self._destroy is not None:
            self._destroy()

    def abort(self) -> None:
        """Ends it on this rank: whatever is called on it from now on raises CommunicationError. Other communicators go
        on. Returns at once; an operation that waits in another thread goes on waiting.

        All members call it, each when it notices that something is wrong. A member that goes on alone waits for this
        one, and is told about it by name every minute (``bagua`` log), until this process leaves the job: then its
        operation fails. Aborting the communicator of all ranks leaves this rank nothing but to leave the job.
        """
        self._aborted = True

    def check_abort(self) -> bool:
        """Returns True if it was aborted on this rank."""
        return self._aborted

    def check_usable(self, connection: Connection) -> None:
        """Raises CommunicationError if it was aborted, BaguaError if it belongs to a session that has ended."""
        if self._aborted:
            raise CommunicationError(
                f"The communicator of ranks {list(self.ranks)} was aborted on this rank. Make a new group and use its "
                "communicators. [BG512]"
            )
        if self.connection is not None and self.connection is not connection:
            raise BaguaError(
                f"The communicator of ranks {list(self.ranks)} was made before destroy_process_group(): make a new one."
                " [BG407]"
            )


def active_members(membership: Membership) -> Members:
    """Returns the members of a generation that take part."""
    return Members(world_number(membership), membership.active, membership.rank)


def world_number(membership: Membership) -> int:
    """The number of the communicator of all members that take part: 0 stands for all that there are."""
    return ACTIVE_ALONE if membership.resting else 0


def _destroy_quietly(connection: Connection, id: int) -> None:
    """Silent when the session has ended, and with it the communicator."""
    with suppress(CommunicationError):  # the daemon may be gone, or the session over
        connection.destroy_comm(id)
