"""Flags: the small all-reduce that ends a unit (``commit.py``). Its end says that all members have called it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import torch

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm.followers import Followers
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.patient_lock import PatientLock
from bagua.torch_api.comm.transfer import ReduceOp, transfer
from bagua.torch_api.join.connection import NOWHERE, Request, request
from bagua.torch_api.join.session import Session

if TYPE_CHECKING:
    from bagua.csrc import core


class Carrier(Protocol):
    """What submits one operation."""

    behind: core.Prepared | None
    """Submitted with it."""


class Flags(threading.local):
    """Of one thread. They carry the most batches of a member in this step, minus the least, and the newest generation
    that was announced.

    Where all that a unit communicates are collectives of one communicator, they are sent behind the last of these,
    before it is waited for, or with it. They are fenced: each host begins them when all before them is done there. So a
    rank that sees their end knows that the unit's results are whole on all ranks. That saves a way to the daemon and
    back.

    ``comm``: those of a unit on this communicator may be sent so; None: of none. ``early``: they were, and no thread
    enters a generation before their ``release``. ``ticket``: of flags that have been sent and not been waited for.
    ``heard``: there are none left.
    """

    def __init__(self, session: Session, followers: Followers, under_way: PatientLock) -> None:
        """``under_way`` is held while flags that were sent early are not over."""
        self._session = session
        self._followers = followers
        self._under_way = under_way
        self._planned = session.connection.native.planned  # once per step: no function around it
        # By communicator, once ``_all`` lies in memory that the daemon sees:
        self._requests: dict[int, Request] = {}
        self._prepared: dict[int, core.Prepared] = {}
        self._use(torch.zeros(3, dtype=torch.int32))
        self._place = NOWHERE
        self._shared = False
        self.comm: int | None = None
        self.ticket: int | None = None
        self._failure: CommunicationError | None = None  # of flags that are over, and have not been heard
        self.early, self.heard = False, True

    def _use(self, memory: torch.Tensor) -> None:
        """From now on they lie there."""
        self._all = memory
        self._values = (ctypes.c_int32 * 3).from_address(memory.data_ptr())  # faster than torch, once per step
        self._requests.clear()
        self._prepared.clear()

    def send_early(self, members: Members) -> Flags | None:
        """All that a unit communicates has been submitted, on this communicator. Called again where the unit goes on
        after all. None: they were not sent.

        Their end comes after that of all operations before them. A rank that has ``await_sent`` before it waits for the
        last of these sleeps once, and the daemon wakes it once.
        """
        if not self._may_go(members):
            return None
        self._submit(members)
        return self

    def send_along(self, members: Members, last: Carrier, start: Callable[[], None]) -> bool:
        """``send_early``, with the last operation of a unit that begins now: the daemon is told of both at once.
        ``start`` submits that one. False: nothing was submitted, or only the last one."""
        if len(members.ranks) < 2 or not self._under_way.take_if_free():
            return False
        self.early = True
        prepared = self._prepared.get(members.id) or self._prepare(members.id)
        self._fill()
        prepared.ticket, last.behind = 0, prepared
        try:
            start()
        finally:
            last.behind = None
            if prepared.ticket:
                self.ticket, self.heard = prepared.ticket, False
            else:
                self.release()
        return self.early

    def sent(self, _: object) -> Flags:
        """Those that have been."""
        return self

    def _may_go(self, members: Members) -> bool:
        if self.comm != members.id or len(members.ranks) < 2:
            return False
        if self.early:
            self.hear()
            return True
        # A thread that entered the next generation meanwhile would tell the others that this unit is not ready here,
        # while one of them has committed it. Where such a thread is at work, flags are sent late.
        self.early = self._under_way.take_if_free()
        return self.early

    def exchange(self, members: Members, queued: bool = False) -> None:
        """Sends them now, and waits. ``queued``: other members may have sent theirs early."""
        self._fill()
        if members.nranks() < 2:
            return
        if not queued:
            transfer(self._session, "allreduce", self._all, self._all, 3, members, op=ReduceOp.MAX, together=True)
            return
        self._submit(members)
        self.hear()

    def _fill(self) -> None:
        given = self._followers.given if self._followers.by_name else 0
        self._values[:] = (given, -given, self._planned())

    def _submit(self, members: Members) -> None:
        operation = self._requests.get(members.id) or self._request(members.id)
        self._fill()
        self.ticket, self.heard = self._session.connection.submit(operation), False

    def _prepare(self, comm: int) -> core.Prepared:
        operation = self._requests.get(comm) or self._request(comm)
        self._prepared[comm] = made = self._session.connection.prepare(operation)
        return made

    def _request(self, comm: int) -> Request:
        if not self._shared:
            memory, self._place = self._session.memory.place_empty(3, torch.int32)
            self._use(memory)
            self._shared = True
        connection = self._session.connection
        kind, dtype = connection.kinds["allreduce"], connection.dtypes["int32"]
        place = self._place
        made = request(kind, comm=comm, dtype=dtype, count=3, op=ReduceOp.MAX, src=place, dst=place, label="flags")
        made["fenced"] = True
        self._requests[comm] = made
        return made

    def await_sent(self) -> None:
        """Waits until those that have been sent are over, well or not: ``hear`` tells errors, when those of the
        operations before them have been."""
        if self.ticket is None:
            return
        try:
            self._session.connection.wait(self.ticket)
        except CommunicationError as error:
            self._failure = error
        self.ticket = None  # an exception like that of Ctrl-C leaves it: see ``drop``

    def arrive(self) -> None:
        """Those that have been sent were waited for, with others, and are over well."""
        self.ticket, self.heard = None, True

    def hear(self) -> None:
        """Waits for those that have been sent. Raises CommunicationError."""
        if self.ticket is not None:
            self.await_sent()
        failure, self._failure = self._failure, None
        self.heard = True
        if failure is not None:
            raise failure

    def drop(self) -> None:
        """The unit has ended by an exception. If that was one like that of Ctrl-C, flags are left: waits for nothing."""
        if self.ticket is None or self._session.connection.done(self.ticket):
            with suppress(CommunicationError):
                self.hear()
        else:
            self.ticket, self.heard = None, True
            self._shared = False  # the daemon may still write there
            self._use(torch.zeros(3, dtype=torch.int32))
        self.release()

    def release(self) -> None:
        """The unit counts, or is to be exchanged again: from now on threads may enter a generation."""
        if self.early:
            self.early = False
            self._under_way.give_back()

    def take(self) -> tuple[int, int, int]:
        """Those of all members: the most batches, the least, and the newest generation that was announced."""
        most, least, planned = self._values
        self._values[:] = (0, 0, 0)
        return most, -least, planned
