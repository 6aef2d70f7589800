"""Holds back operations of ranks that are not in step, until all their members have begun them.

An operation that was handed to a device waits there for the other members. Calls that wait for the whole device
(``torch.cuda.synchronize``, the first use of a kernel) then wait for these members, too. If one of them waits meanwhile
on the host for this rank, all wait for ever. So the daemons tell first, by a barrier, that all members have begun. Then
a thread of each rank hands the operation over, wherever its program is, and the device waits no longer than these
threads need.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress

from bagua.base.errors import CommunicationError
from bagua.torch_api.job.connection import HostConnection, Request, request

Handed = Callable[[], int]  # Hands an operation over; returns the ticket of the device

FIRST_LOOK_S, LONGEST_LOOK_S = 0.0005, 0.005  # between two looks whether members have arrived
END_S = 5.0  # for the thread to end: it may be handing an operation over


class _Held:
    __slots__ = ("abandoned", "arrival", "comm", "error", "hand_over", "handing", "over", "ticket")

    def __init__(self, comm: int, arrival: int, hand_over: Handed) -> None:
        self.comm = comm
        self.arrival = arrival  # the barrier's ticket
        self.hand_over = hand_over
        self.ticket: int | None = None
        self.error: Exception | None = None
        self.handing = self.abandoned = False
        self.over = False  # it has a ticket of the device, or an error


class Gate:
    """Operations of one device. Their tickets here are negative, those of the device are not. Thread-safe."""

    def __init__(self, host: HostConnection, abandon: Callable[[int], None]) -> None:
        """``abandon``: the device's function, which takes a ticket of the device."""
        self._host = host
        self._abandon = abandon
        self._numbers = itertools.count(-1, -1)
        self._held: dict[int, _Held] = {}
        self._queue: list[_Held] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, operation: Request, hand_over: Handed) -> int:
        """Returns a ticket at once. ``hand_over`` is called by another thread. Operations of a communicator are handed
        over in their order."""
        comm = operation["comm"]
        barrier = request(self._host.kinds["barrier"], comm=comm, dtype=self._host.dtypes["uint8"], count=0)
        # The daemon's barrier: it is over when all members have begun.
        held = _Held(comm, self._host.submit(barrier), hand_over)
        number = next(self._numbers)
        with self._changed:
            if self._closed:  # nobody would hand it over
                raise closed()
            self._held[number] = held
            self._queue.append(held)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="bagua-gate", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return number

    def done(self, number: int, done: Callable[[int], bool]) -> bool:
        """Returns True if the operation is over, well or not. ``done``: the device's, of a ticket of its own."""
        held = self._held[number]
        return held.over and (held.ticket is None or done(held.ticket))

    def await_ticket(self, number: int) -> int:
        """Waits until the operation is handed over; returns the device's ticket. Raises what kept it from that, or
        CommunicationError at the limit of waits."""
        held = self._held[number]
        waited, more = 0.0, self._host.first_warning_s
        while not self._await(held, more):
            waited += more
            more = self._host.go_on(waited)
        del self._held[number]
        if held.error is not None:
            raise held.error
        assert held.ticket is not None
        return held.ticket

    def _await(self, held: _Held, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: held.over, seconds)

    def abandon(self, number: int) -> None:
        """Notes that nobody will wait for the operation."""
        with self._changed:
            held = self._held.pop(number)
            held.abandoned = True
            ticket = held.ticket
        if ticket is not None:
            self._abandon(ticket)

    def drop(self, error: Exception) -> None:
        """Drops operations that are held here: ``await_ticket`` raises this error. One that is being handed over
        ends as the device has it.
        """
        with self._changed:
            dropped = [held for held in self._queue if not held.handing]
            for held in dropped:
                held.error, held.over = error, True
                self._queue.remove(held)
            self._changed.notify_all()
        for held in dropped:
            with suppress(CommunicationError):
                self._host.abandon(held.arrival)

    def close(self) -> None:
        """Drops all operations, and refuses further ones."""
        with self._changed:
            self._closed = True
        self.drop(closed())
        if self._thread is not None:
            self._thread.join(END_S)

    def _serve(self) -> None:
        pause = FIRST_LOOK_S
        while not self._closed:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                queue = list(self._queue)  # a copy: other threads add to the queue meanwhile
            if self._look(queue):
                pause = FIRST_LOOK_S
                continue
            with self._changed:
                self._changed.wait(pause)  # no wait for the barrier, which would have a limit
            pause = min(2 * pause, LONGEST_LOOK_S)

    def _look(self, queue: list[_Held]) -> bool:
        """Hands over operations that all members have begun. Returns True if there were any."""
        found = False
        behind = set[int]()  # communicators of which an earlier one is not handed over
        for held in queue:
            if held.comm in behind or not self._arrived(held):
                behind.add(held.comm)
                continue
            found = True
            self._hand(held)
        return found

    def _arrived(self, held: _Held) -> bool:
        try:
            return self._host.done(held.arrival)
        except CommunicationError:  # ``wait`` raises it again, for the caller of ``await_ticket``
            return True

    def _hand(self, held: _Held) -> None:
        with self._changed:
            if held.over:  # dropped while this thread looked
                return
            held.handing = True  # from here on ``drop`` leaves it to this thread
        ticket, error = None, None
        try:
            self._host.wait(held.arrival)
            ticket = held.hand_over()  # without the lock: it may wait in the driver
        except Exception as raised:  # the caller of ``await_ticket`` gets it, whatever it is
            error = raised
        with self._changed:
            self._queue.remove(held)
            held.ticket, held.error, held.over = ticket, error, True
            abandoned = held.abandoned
            self._changed.notify_all()
        if abandoned and ticket is not None:
            self._abandon(ticket)


def closed() -> CommunicationError:
    """The error of operations after ``close``."""
    return CommunicationError(
        "This rank's connection to the GPU was closed: its job has ended, or destroy_process_group() was called. Call "
        "init_process_group() and wrap the model again to go on. [BG506]"
    )
