"""Flags: the small all-reduce that ends a unit (``commit/ledger.py``). Its end says that all members have called it."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.patient_lock import PatientLock
from bagua.torch_api.comm.step_state import Followers
from bagua.torch_api.comm.transfer import ReduceOp, transfer
from bagua.torch_api.job.connection import NOWHERE, UNTOLD, Told
from bagua.torch_api.job.session import Session

if TYPE_CHECKING:
    from bagua.csrc import core


class Operation(Protocol):
    """One operation that is submitted. ``behind``: flags that go with it."""

    behind: core.Flags | None


class Last(Protocol):
    """The last run of a unit, with one operation."""

    @property
    def single(self) -> Operation | None: ...


class Flags(threading.local):
    """Flags of one thread. They carry the most batches of a member in this step, minus the least, and the newest
    generation that was announced (``told``).

    Where all that a unit communicates are collectives of one communicator, they are sent behind the last of these,
    before it is waited for, or with it. They are fenced: each host begins them when all before them is done there. So a
    rank that sees their end knows that the unit's results are whole on all ranks. That saves a way to the daemon and
    back.

    ``inside``: this thread runs a unit. ``caught_up_in``: the generation in which its models have begun anew last;
    ``catches_up``: they do now. ``comm``: the flags of a unit on this communicator may be sent so; None: of
    none. ``early``: they were, and no thread enters a generation before their ``release``. ``sent``: those that have
    been and were not waited for. ``heard``: there are none left.
    """

    def __init__(self, session: Session, followers: Followers, under_way: PatientLock) -> None:
        """``under_way`` is held while flags that were sent early are not over."""
        self._session = session
        self._followers = followers
        self._under_way = under_way
        self._made: dict[int, core.Flags] = {}  # by communicator, once ``_all`` lies in memory that the daemon sees
        self._place = NOWHERE
        self._shared = False
        self._use(torch.zeros(3, dtype=torch.int32))  # three: most, minus the least, and the newest planned generation
        self.inside = self.catches_up = False
        self.caught_up_in = 0
        self.comm: int | None = None
        self.sent: core.Flags | None = None
        self._carrier: Operation | None = None
        self._failure: CommunicationError | None = None  # of flags that are over, and have not been heard
        self.early, self.heard = False, True
        self.told = UNTOLD

    def _use(self, memory: torch.Tensor) -> None:
        """From now on they lie there."""
        self._all = memory
        self._values = (ctypes.c_int32 * 3).from_address(memory.data_ptr())  # faster than torch
        self._made.clear()

    def send_early(self, members: Members) -> Flags | None:
        """Sends the flags when all that a unit communicates has been submitted, on this communicator. Called again
        where the unit goes on after all. None: they were not sent.

        Their end comes after that of all operations before them. A rank that has ``await_sent`` before it waits for the
        last of these sleeps once, and the daemon wakes it once.
        """
        if self.comm != members.id or members.nranks() < 2:
            return None
        if self.early:
            self.hear()
        # A thread that entered the next generation meanwhile would tell the others that this unit is not ready here,
        # while one of them has committed it. Where such a thread is at work, flags are sent late.
        elif not self._under_way.take_if_free():
            return None
        self.early = True
        self._send(members)
        return self

    def attach(self, members: Members, last: Last) -> bool:
        """The last operation of a unit that begins now takes the flags along: the daemon is told of both at once. From
        now on no thread enters a generation. Submit that one, if it still may, and ask ``sent_along``. False: it takes
        none."""
        carrier = last.single
        if carrier is None or len(members.ranks) < 2 or not self._under_way.take_if_free():
            return False
        self.early = True
        try:
            made = self._made.get(members.id) or self._make(members.id)
        except BaseException:  # no memory: nothing was sent, and other threads may go on
            self.release()
            raise
        if self._followers.by_name:
            made.given = self._followers.given
        made.ticket = 0
        carrier.behind, self._carrier = made, carrier
        return True

    def sent_along(self) -> bool:
        """Returns True if the operation that they were attached to was submitted, and they with it."""
        carrier, self._carrier = self._carrier, None
        if carrier is None or carrier.behind is None:
            return False
        made, carrier.behind = carrier.behind, None
        if not made.ticket:
            self.release()
            return False
        self.sent, self.heard = made, False
        return True

    def exchange(self, members: Members, queued: bool = False) -> None:
        """Sends them now, and waits. ``queued``: other members may have sent theirs early."""
        given = self._followers.given
        # One reduction, MAX, finds the least, too: with its sign turned.
        self.told = given, -given, self._session.connection.planned()
        if members.nranks() < 2:
            return
        if not queued:
            self._values[:] = list(self.told)
            transfer(self._session, "allreduce", self._all, self._all, 3, members, op=ReduceOp.MAX, together=True)
            self.told = self._read()
            return
        self._send(members)
        self.hear()

    def _read(self) -> Told:
        most, least, planned = self._values
        return most, least, planned

    def _send(self, members: Members) -> None:
        made = self._made.get(members.id) or self._make(members.id)
        made.given = self._followers.given
        self._session.connection.send_flags(made)
        self.sent, self.heard = made, False

    def _make(self, comm: int) -> core.Flags:
        if not self._shared:
            memory, self._place = self._session.memory.place_empty(3, torch.int32)
            self._use(memory)
            self._shared = True
        self._made[comm] = made = self._session.connection.native.flags(comm, self._all.data_ptr(), self._place)
        return made

    def await_sent(self) -> None:
        """Waits until those that have been sent are over, well or not: ``hear`` tells errors, when those of the
        operations before them have been."""
        if self.sent is None:
            return
        try:
            self._session.connection.wait(self.sent.ticket)
        except CommunicationError as error:
            self._failure = error
        self.told = self._read()
        self.sent.ticket, self.sent = 0, None  # an exception like that of Ctrl-C leaves it: see ``drop``

    def arrive(self, told: Told) -> None:
        """Notes that the flags under way were waited for, with others, and are over well."""
        self.told, self.sent, self.heard = told, None, True

    def hear(self) -> None:
        """Waits for those that have been sent. Raises CommunicationError."""
        if self.sent is not None:
            self.await_sent()
        failure, self._failure = self._failure, None
        self.heard = True
        if failure is not None:
            raise failure

    def drop(self) -> None:
        """The unit has ended by an exception. If flags are left, it was one like that of Ctrl-C: waits for nothing."""
        if self.sent is not None and not self.sent.ticket:  # over, and the exception came before that was noted
            self.sent, self.heard = None, True
        if self.sent is None or self._session.connection.done(self.sent.ticket):
            with suppress(CommunicationError):
                self.hear()
        else:
            self._session.connection.abandon(self.sent.ticket)
            self.sent, self.heard = None, True
            self._shared = False  # the daemon may still write there
            self._use(torch.zeros(3, dtype=torch.int32))
        self.release()

    def release(self) -> None:
        """The unit counts, or is to be exchanged again: from now on threads may enter a generation."""
        if self.early:
            self.early = False
            self._under_way.give_back()
