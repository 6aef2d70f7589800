"""Flags: the small all-reduce that ends a unit (``commit.py``). Its end says that all members have called it."""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress

import torch

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm.followers import Followers
from bagua.torch_api.comm.members import Members
from bagua.torch_api.comm.patient_lock import PatientLock
from bagua.torch_api.comm.transfer import ReduceOp, transfer
from bagua.torch_api.join.connection import NOWHERE, Request, request
from bagua.torch_api.join.session import Session


class Flags(threading.local):
    """Of one thread. They carry the most batches of a member in this step, minus the least, and the newest generation
    that was announced.

    Where all that a unit communicates are collectives of one communicator, they are sent behind the last of these,
    before it is waited for. They are fenced: each host begins them when all before them is done there. So a rank that
    sees their end knows that the unit's results are whole on all ranks. That saves a way to the daemon and back.
    """

    def __init__(self, session: Session, followers: Followers, under_way: PatientLock) -> None:
        """``under_way`` is held while flags that were sent early are not over."""
        self._session = session
        self._followers = followers
        self._under_way = under_way
        self._use(torch.zeros(3, dtype=torch.int32))
        self._requests: dict[int, Request] = {}  # by communicator, once ``_all`` lies in memory that the daemon sees
        self._place = NOWHERE
        self._shared = False
        self._comm: int | None = None
        self._ticket: int | None = None
        self._failure: CommunicationError | None = None  # of flags that are over, and have not been heard
        self.early = False

    def _use(self, memory: torch.Tensor) -> None:
        """From now on they lie there."""
        self._all = memory
        self._values = (ctypes.c_int32 * 3).from_address(memory.data_ptr())  # faster than torch, once per step

    def may_be_early(self, comm: int | None) -> int | None:
        """From now on those of a unit on this communicator may; None: of none. Returns the one before."""
        before, self._comm = self._comm, comm
        return before

    def send_early(self, members: Members) -> None:
        """All that a unit communicates has been submitted, on this communicator. Called again where the unit goes on
        after all.

        Their end comes after that of all operations before them. A rank that has ``await_sent`` before it waits for the
        last of these sleeps once, and the daemon wakes it once.
        """
        if self._comm != members.id or members.nranks() < 2:
            return
        if self.early:
            self.hear()
        # A thread that entered the next generation meanwhile would tell the others that this unit is not ready here,
        # while one of them has committed it. Where such a thread is at work, flags are sent late.
        if self._under_way.take_if_free():
            self.early = True
            self._submit(members)

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
        given = self._followers.given
        self._values[:] = [given, -given, self._session.connection.planned()]

    def _submit(self, members: Members) -> None:
        operation = self._requests.get(members.id) or self._request(members.id)
        self._fill()
        self._ticket = self._session.connection.submit(operation)

    def _request(self, comm: int) -> Request:
        if not self._shared:
            memory, self._place = self._session.memory.place_empty(3, torch.int32)
            self._use(memory)
            self._shared = True
            self._requests.clear()
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
        if self._ticket is None:
            return
        try:
            self._session.connection.wait(self._ticket)
        except CommunicationError as error:
            self._failure = error
        self._ticket = None  # an exception like that of Ctrl-C leaves it: see ``drop``

    def hear(self) -> None:
        """Waits for those that have been sent. Raises CommunicationError."""
        if self._ticket is not None:
            self.await_sent()
        failure, self._failure = self._failure, None
        self._release()
        if failure is not None:
            raise failure

    def drop(self) -> None:
        """The unit has ended. If flags are left, that was by an exception, as that of Ctrl-C: waits for nothing."""
        if self._ticket is None and self._failure is None and not self.early:
            return
        if self._ticket is None or self._session.connection.done(self._ticket):
            with suppress(CommunicationError):
                self.hear()
            return
        self._ticket = self._failure = None
        self._shared = False  # the daemon may still write there
        self._use(torch.zeros(3, dtype=torch.int32))
        self._requests.clear()
        self._release()

    def _release(self) -> None:
        if self.early:
            self.early = False
            self._under_way.give_back()

    def take(self) -> tuple[int, int, int]:
        """Those of all members: the most batches, the least, and the newest generation that was announced."""
        most, least, planned = self._values
        self._values[:] = [0, 0, 0]
        return most, -least, planned
