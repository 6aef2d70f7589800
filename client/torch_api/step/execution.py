"""Executions: a bucket's plan at work, again and again.

There is no thread: the user's thread submits operations, and the daemon carries them out, or small ones the ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Protocol

import torch

from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.comm.commit.flags import Flags
from bagua.torch_api.comm.members import Members
from bagua.torch_api.job.connection import Connection, Regrouped, Request, Times
from bagua.torch_api.step.phases import NOTHING, PLAN, PROFILER, SUBMIT, WAIT, WATCH, phase

if TYPE_CHECKING:
    from bagua.csrc import core

Work = Callable[[], None]
Tickets = tuple[int, ...]
LOOK_AGAIN_S = 0.001


class Undo(Protocol):
    """Contents that a plan changes while it communicates; see ``undo.py``. ``needed``: there are any. ``saved``: set it
    to False when the changes count."""

    needed: bool
    saved: bool

    def save(self) -> None: ...

    def restore(self) -> None: ...


class Execution:
    """One bucket's plan at work: its steps fall into phases, each of which ends with one that communicates.

    In an elastic job it ``holds`` back what a plan can't do twice: all that follows the last step that communicates. A
    run is in one of these states, which flags tell:

        a run                                    flags                  ends with
        none                                                            start
        is under way                             started                advance, until it returns False
        has come to the last step, and holds     arrived                conclude
        was cut off: members have changed        started, lost          rewind, and start
        was cut off after its last step          arrived, lost          rewind; conclude where others have committed it
        could not begin: its generation is over  started, lost, ended   rewind, once the next one is entered

    ``starts``: how many runs have begun. ``single``: the only operation of a run.
    """

    __slots__ = (
        "__weakref__",
        "_closing",
        "_connection",
        "_name",
        "_number",
        "_phases",
        "_steady",
        "_tickets",
        "_undo",
        "arrived",
        "ended",
        "holds",
        "lost",
        "may_begin",
        "single",
        "started",
        "starts",
    )

    def __init__(
        self,
        name: str,
        phases: Sequence[Phase],
        connection: Connection,
        undo: Undo | None = None,
        steady: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """``undo``: takes back what the plan changes while it communicates; with it, the execution holds. ``steady``:
        inside it operations are of one generation."""
        self._name = name
        self._connection = connection
        self.holds = undo is not None
        closes = self.holds and phases[-1][1] is None
        self._closing = phases[-1][0] if closes else ()
        self._phases = phases[:-1] if closes else phases
        self._undo = undo if undo is not None and undo.needed else None  # no copies where nothing changes in place
        self._number = 0
        self._tickets: Tickets = ()
        self.started = self.arrived = self.lost = self.ended = False
        self.starts = 0
        action = self._phases[0][1] if len(self._phases) == 1 else None
        self.single = action if isinstance(action, Submit) else None
        self._steady = steady if self.single is None else nullcontext  # one operation is of one generation anyway
        self.may_begin: Callable[[], bool] | None = None  # when it is started, and not only when it is joined

    def start(self) -> None:
        """Begins the first phase. Raises BaguaError if the last run has not been joined. Where members have changed, or
        it may not begin yet, it is told as started, and ``lost``."""
        if self.started:
            raise BaguaError(f"Bucket {self._name} was started twice: join it in between. [BG604]")
        if not self._phases or (self.may_begin is not None and not self.may_begin()):
            self.lost = bool(self._phases)  # without phases there is nothing to repeat
        else:
            if self._undo is not None:
                self._undo.save()
            self._number = 0
            # Asked here, in no function: it is the way of each gradient.
            watched = WATCH.sink is not None or PROFILER._is_profiler_enabled
            try:
                with phase(SUBMIT, self._name) if watched else NOTHING, self._steady():
                    work, action = self._phases[0]
                    for one in work:
                        one()
                    self._tickets = action.begin() or () if action is not None else ()
            except Regrouped:
                if not self.holds:
                    raise
                self.lost = self.ended = True
        self.started = True
        self.starts += 1

    def done(self) -> bool:
        """Returns True if the operations of the current phase are over; True if not started."""
        return all(self._connection.done(ticket) for ticket in self._tickets)

    def advance(self, times: list[Times]) -> bool:
        """Waits for the current phase, and adds its times; begins the next one. False: there is none, and the plan may
        be started anew. Raises Regrouped if it is lost."""
        if self.lost:
            raise Regrouped(f"Bucket {self._name} was started before members changed.")
        self.started = False  # stays so if anything below raises
        self._await(times)
        last = self._number + 1 >= len(self._phases)
        if last and self.holds:
            self.arrived = True
            return False
        action = self._phases[self._number][1]
        if action is not None and action.finish is not None:
            with phase(PLAN, self._name):
                action.finish()
        if last:
            return False
        self._number += 1
        with phase(PLAN, self._name):
            work, action = self._phases[self._number]
            for one in work:
                one()
            self._tickets = action.begin() or () if action is not None else ()
        self.started = True
        return True

    def _await(self, times: list[Times]) -> None:
        tickets, self._tickets = self._tickets, ()
        with phase(WAIT, self._name):
            for ticket in tickets:
                times.append(self._connection.wait(ticket))
        if (sink := WATCH.sink) is not None and tickets:
            sink.operations(self._name, times[-len(tickets) :])

    def catch_up(self, starts: int) -> None:
        """Takes part in runs that other ranks have begun, until there were ``starts``, and does nothing else for
        them."""
        action = self._phases[0][1]
        while self.starts < starts:
            self.abandon()
            self._tickets = (action.begin() if action is not None else None) or ()
            self.started = True
            self.starts += 1

    def abandon(self) -> bool:
        """Forgets a run, once its operations are over, well or not. True if there was something to forget."""
        under_way, self.started = self.started, False
        tickets, self._tickets = self._tickets, ()
        for ticket in tickets:
            with suppress(CommunicationError):
                self._connection.wait(ticket)
        return under_way

    def leave(self, until: float) -> None:
        """Leaves a run as ``abandon`` does, without other ranks: operations that are not over at that moment
        (``time.monotonic()``) go on without this run, and the daemon, or the device, keeps their memory as long."""
        tickets, self._tickets, self.started = self._tickets, (), False
        for ticket in tickets:
            with suppress(CommunicationError):
                # ``wait`` would make a device's stream wait without a limit.
                while not (over := self._connection.done(ticket)) and time.monotonic() < until:
                    time.sleep(LOOK_AGAIN_S)
                if over:
                    self._connection.wait(ticket)
                else:
                    self._connection.abandon(ticket)

    # After a loss

    def renew(self) -> None:
        """The generation in which it was started has ended. Results that have arrived stay: others may count them."""
        if self.started:
            self.abandon()
            self.started = True  # ``abandon`` has ended it; it is to be started again
        self.lost = self.started or self.arrived
        self.ended = False

    def rewind(self) -> None:
        """Forgets this run: contents are as before it, where it holds."""
        self.starts -= self.holds and (self.started or self.arrived)  # a run and its repeat count as one
        self.abandon()
        self.arrived = self.lost = self.ended = False
        if self._undo is not None:
            self._undo.restore()

    def put_back(self) -> None:
        """Contents are as before this run, and may be changed."""
        if self._undo is not None:
            self._undo.restore()
            self._undo.saved = False

    def conclude(self) -> None:
        """The unit is committed: runs what follows the last step that communicates."""
        if not self.arrived:
            return
        self.arrived = self.lost = False
        last = self._phases[-1][1] if self._phases else None
        if last is not None and last.finish is not None:
            last.finish()
        for work in self._closing:
            work()
        for _, action in self._phases:
            if action is not None and action.commit is not None:
                action.commit()
        if self._undo is not None:
            self._undo.saved = False

    def is_all_in(self, comm: int) -> bool:
        """Returns True if all of this run has been submitted, and what is not over is on this communicator, in
        order."""
        left = 0  # the first has begun
        for _, action in self._phases[self._number :]:
            if action is not None:
                left += 1
                if action.comm != comm:
                    return False
        return left < 2 and not self.lost  # the current phase is submitted, a later one is not

    @property
    def actions(self) -> list[Action]:
        """Steps that communicate."""
        return [action for _, action in self._phases if action is not None]


EngineResidual = tuple[int, int]
"""Number and ``residual_sides`` of an operation's error feedback; zeros where it has none."""
NO_ENGINE_RESIDUAL: EngineResidual = (0, 0)


class Action:
    """One step of one bucket that communicates. This one has no error feedback."""

    __slots__ = ()

    finish: Work | None = None
    """Called when all has arrived; None where there is nothing to do."""

    commit: Work | None = None
    """In an elastic job: called when the run counts, and the next one will not repeat it; None likewise."""

    @property
    def comm(self) -> int | None:
        """Number of the communicator on which its operations are collectives; None where they are others."""
        return None

    def begin(self) -> Tickets | None:
        """Submits. None where this rank has no part in the step."""
        raise NotImplementedError

    def residual(self) -> EngineResidual | None:
        """Returns the engine's residual among all ranks of the model. None where the step has none, or other ranks have
        no such step."""
        return None

    def follow(self, residual: EngineResidual) -> None:
        """Takes the residual that it is on the other ranks. Called on a newcomer."""

    def shared(self) -> Sequence[torch.Tensor]:
        """Error feedback of this rank that is the same on all ranks."""
        return ()

    def own(self) -> Sequence[torch.Tensor]:
        """Error feedback of this rank that is its own."""
        return ()

    # When buckets are cut anew: see ``rebucket.py``

    def in_engine(self) -> Mapping[Members, EngineResidual]:
        """Residuals of the engine, by communicator."""
        return {}

    def number_among(self, members: Members) -> int:
        """The residual's number on this communicator, which it is given now if it has none."""
        return 0

    def follow_among(self, members: Members, residual: EngineResidual) -> None:
        """Takes this residual on this communicator."""

    def count(self) -> int:
        """Elements of its vector, with the tail."""
        raise NotImplementedError


Phase = tuple[Sequence[Work], Action | None]
"""Work of this rank alone, and then the step that communicates; None at the end of a plan."""


class Submit(Action):
    """The action that submits one prepared operation: everything is known beforehand, and one call does it.

    ``behind``: flags that are submitted with it. ``waited_for``: set while the caller waits for it right after the
    submission, so that a small one needs no daemon."""

    __slots__ = ("_may_defer", "_request", "_submit", "behind", "commit", "members", "waited_for")

    @property
    def comm(self) -> int:
        return self._request["comm"]

    def __init__(self, request: Request, connection: Connection, members: Members) -> None:
        """``members``: those of its communicator."""
        self.members = members
        self.behind: core.Flags | None = None
        self.waited_for = False
        self._may_defer = connection.may_defer
        self._request = request
        self._submit = connection.submit
        # 0: no run is repeated, and the engine writes where it reads.
        self.commit: Work | None = self._turn if request["residual_sides"] else None

    def _turn(self) -> None:
        self._request["residual_sides"] = other_sides(self._request["residual_sides"])

    def begin(self) -> Tickets:
        operation = self._request
        if self.behind is not None:  # the request lasts: flags go with a copy of it
            operation = {**operation, "behind": self.behind}
        if self.waited_for and self._may_defer and WATCH.sink is None:  # a trace shows what the daemon does
            operation = {**operation, "defer": True}
        return (self._submit(operation),)

    def residual(self) -> EngineResidual | None:
        found = self._request["residual"], self._request["residual_sides"]
        return found if found[0] else None

    def follow(self, residual: EngineResidual) -> None:
        self._request["residual"], self._request["residual_sides"] = residual

    def in_engine(self) -> Mapping[Members, EngineResidual]:
        found = self.residual()
        return {} if found is None else {self.members: found}

    def number_among(self, members: Members) -> int:
        return self._request["residual"]

    def follow_among(self, members: Members, residual: EngineResidual) -> None:
        self.follow(residual)

    def count(self) -> int:
        return self._request["count"]


def other_sides(sides: int) -> int:
    """``residual_sides`` of the next operation that counts: what this one wrote, that one reads."""
    return 3 - sides  # 1: reads side 0 and writes 1; 2: the reverse


class NotReady(Execution):
    """The execution of a bucket that has no plan yet, or belongs to no model any more."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__(name, (), None)  # type: ignore[arg-type]  # nothing is submitted

    def start(self) -> None:
        """Raises BaguaError."""
        raise BaguaError(
            f"Bucket {self._name} can't run: it has no plan yet, or its model has been wrapped anew. [BG604]"
        )


class Executes(Protocol):
    """A bucket, as ``join_all`` sees it."""

    @property
    def execution(self) -> Execution: ...


SendFlags = Callable[[Sequence[Execution]], Flags | None]
"""See ``join_all``."""


def join_all(buckets: Iterable[Executes], send_flags: SendFlags | None = None) -> list[Times]:
    """Waits for all buckets that have been started, and runs the rest of their plans, one phase of all after the
    other: the order of operations is the same on all ranks, and phases of different buckets overlap. ``send_flags``:
    called with those that are under way before each phase is waited for; flags that it returns are waited for before
    the last.

    Returns the times of the operations. Raises CommunicationError, and errors of ``Local`` steps.
    """
    times: list[Times] = []
    running: list[Execution] = []
    for bucket in buckets:
        if bucket.execution.started:
            running.append(bucket.execution)
    while running:
        flags = None if send_flags is None else send_flags(running)
        if _join_at_once(running, flags, times):
            break
        *others, last = running  # flags went after the last: all others are over when they come
        running = [run for run in others if run.advance(times)]
        if flags is not None:
            flags.await_sent()
        if last.advance(times):
            running.append(last)
    return times


def _join_at_once(running: Sequence[Execution], flags: Flags | None, times: list[Times]) -> bool:
    """``join_all`` in one call, where each has a single operation. False: it is not to be had, and nothing happened."""
    if WATCH.sink is not None or PROFILER._is_profiler_enabled:  # a trace shows each wait as a phase
        return False
    tickets: list[int] = []
    for run in running:
        if run.single is None or run.lost:
            return False
        tickets += run._tickets
    for run in running:  # the tickets are this thread's: another one that enters a generation leaves them alone
        run.started = False
    found, told = running[0]._connection.wait_all(tickets, None if flags is None else flags.sent)
    if len(found) < len(tickets):
        for run in running:
            run.started = True
        return False
    for run in running:  # without a call: it is time in which nothing else is under way
        run.arrived, run._tickets = run.holds, ()
    if flags is not None:
        flags.arrive(told)
    times += found
    return True
