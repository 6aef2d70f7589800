"""Runs the units of an elastic job: exchanges that are repeated when members were lost (``ledger.py`` has the rule).
Between two training steps planned changes take place: members leave, and newcomers are let in
(``state_holders.py``)."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, Protocol, TypeVar

from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.comm.admission import Admission, Unfit
from bagua.torch_api.comm.commit.flags import Flags
from bagua.torch_api.comm.commit.ledger import Ledger
from bagua.torch_api.comm.enter_messages import Row, call_the_roll
from bagua.torch_api.comm.members import Members, active_members
from bagua.torch_api.comm.membership_change import MembershipChanges
from bagua.torch_api.comm.patient_lock import PatientLock
from bagua.torch_api.comm.state_holders import Outcome, Standing, settle
from bagua.torch_api.comm.step_state import Followers
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.connection import UNTOLD, Regrouped
from bagua.torch_api.job.session import Session

LOG = logging.getLogger("bagua")
T = TypeVar("T")


def nothing() -> None:
    """There is nothing to be undone, or to be shown."""


class OutOfStep(Protocol):
    """A model that each rank exchanges at moments of its own. ``thread``: number of the one that trains it."""

    thread: int

    def begin_anew_together(self) -> bool:
        """If members have changed since it was done last: as a unit of all members. False: they have not."""
        ...


class Numbering(Protocol):
    """Numbers of communicators, which a repeat gives again: see ``Communicators``."""

    def mark(self) -> int: ...

    def rewind(self, mark: int) -> None: ...


class Unit:
    """One exchange that counts on all members or on none (``ledger.py``), as a block that is entered again after a
    loss:

        unit = Unit(units, scope, members)
        while True:
            with unit:  # a loss ends the block, and the next generation is entered
                if unit.repeated:
                    undo()
                if not unit.settled:
                    found = exchange()  # leaves the old values as they are
                unit.vote()
                return show(found)

    ``repeated``: the exchange was cut off, and no member has its results. ``settled``: it counts. After a loss that may
    be so because a member had committed it: its results are whole here, too. Where the thread runs another unit already
    this one is a part of that.
    """

    __slots__ = (  # one is made for each operation
        "_before",
        "_begun",
        "_comm",
        "_ends_early",
        "_generation",
        "_mark",
        "_members",
        "_numbering",
        "_part",
        "_scope",
        "_stays",
        "_steps",
        "_units",
        "repeated",
        "settled",
    )

    def __init__(
        self,
        units: Units,
        scope: int,
        members: Callable[[], Members],
        ends_early: bool = False,
        steps: bool = False,
        numbering: Numbering | None = None,
    ) -> None:
        """``members``: who takes part, asked when it is voted on. ``ends_early``: the ``flags`` have been sent, or may
        be before the vote; the same on all members. ``steps``: it is a training step, with which the batches of
        samplers are used. ``numbering``: of the communicators that it may make."""
        self._units = units
        self._scope = scope
        self._members = members
        self._ends_early = ends_early
        self._steps = steps
        self._part = units.flags.inside
        self._begun = self.repeated = self.settled = False
        self._numbering = numbering
        self._mark = 0
        self._generation = 0
        self._comm: int | None = None
        self._stays = False  # operations of this thread are of that generation
        self._before: int | None = None

    def __enter__(self) -> None:
        units, flags = self._units, self._units.flags
        if self._part:
            # Operations of a part are not the last of their unit: no flags go along.
            self._comm, flags.comm = flags.comm, None
            return
        if self.settled:
            return
        try:
            if not self._begun:
                self._begun = flags.inside = True
                flags.told = UNTOLD
                if units.some_were_out_of_step:
                    units._stand_by()
            if self._numbering is not None and self.repeated:
                self._numbering.rewind(self._mark)
            # A thread that waits for the members of a planned generation holds ``calm``. This one does not wait for it
            # before the flags are over: others, which that thread waits for, may wait for them.
            self._generation = units.present()
            if self._numbering is not None:  # after other models have begun anew, in units of their own
                self._mark = self._numbering.mark()
            # Whatever other threads enter: operations of this one are of one generation.
            self._before, self._stays = units._session.connection.stay_in(self._generation), True
            flags.comm = self._scope if self._ends_early else None
        except BaseException:
            self._fail()
            raise

    def vote(self) -> None:
        """Returns when all members have whole results; from then on the unit counts. Waits once for tensors of a GPU.
        Raises Regrouped if a member was lost: leave it to the block."""
        units, flags = self._units, self._units.flags
        if self._part:
            flags.comm, self.settled = self._comm, True
            return
        if self.settled:
            return
        if flags.early:  # nothing is on a device, and no thread enters a generation meanwhile
            if not flags.heard:
                units._ledger.set_ready(self._scope)
                flags.hear()
            self._commit()
        else:
            units._devices.await_results()
            units._ledger.set_ready(self._scope)
            flags.exchange(self._members(), queued=self._ends_early)
            with units.calm:
                if units._session.membership.generation != self._generation:  # a thread has told of this unit
                    raise Regrouped(f"Generation {self._generation} has ended.")
                self._commit()
        units._exchanged[self._scope] = self._generation
        self._leave_generation()
        flags.release()

    def _commit(self) -> None:
        """At one blow, for threads that enter a generation: with the unit, the batches of its samplers are used."""
        units = self._units
        units._ledger.commit(self._scope)
        if self._steps:
            if units.followers.by_name:
                units.followers.commit()
            units._planned = max(units._planned, units.flags.told[2])
        self.settled, self.repeated = True, False

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if self._part:
            return False
        if self._stays:
            self._leave_generation()
        if isinstance(error, Regrouped) and not self.settled:
            try:
                self._enter_next()
            except BaseException:
                self._fail()
                raise
            return True
        if error is not None:
            self._fail()
            return False
        self._end()
        return False

    def _enter_next(self) -> None:
        """After a loss: what the others have committed, this member commits, too."""
        units, flags = self._units, self._units.flags
        with suppress(CommunicationError):  # the flags failed with the generation, which Regrouped has told
            flags.hear()
        flags.release()
        units._enter_next(self._generation)
        with units.calm:
            if units._ledger.must_commit(self._scope):
                self._commit()
            else:
                units._ledger.set_unready(self._scope)
                self.repeated = True

    def _end(self) -> None:
        """The results are shown. Raises BaguaError, on all members, if they took different numbers of batches for this
        step."""
        units, flags = self._units, self._units.flags
        most, least, _ = flags.told  # most, and minus the least: the sum is zero where all took as many
        if self._steps and most + least:
            self._fail()
            raise BaguaError(
                f"Ranks took {-least} to {most} batches of their ElasticSamplers for one training step: all take as "
                "many. A batch counts for the step that follows. [BG704]"
            )
        flags.comm, flags.inside = None, False
        units.present()
        if units.changes.told_in != units._session.membership.generation and not flags.catches_up:
            units.changes.tell()

    def _fail(self) -> None:
        flags = self._units.flags
        flags.drop()
        flags.comm, flags.inside = None, False

    def _leave_generation(self) -> None:
        self._stays = False
        self._units._session.connection.stay_in(self._before)


class Units:
    """Runs the units of one session, one at a time. Calls made inside a unit belong to it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._devices = devices(session)
        self._ledger = Ledger()
        self.calm = PatientLock(session.connection)
        # Taken before ``calm`` by a thread that enters a generation.
        self._flags_under_way = PatientLock(session.connection)
        self.followers = Followers()
        self.flags = Flags(session, self.followers, self._flags_under_way)
        self.admission = Admission(session)
        self.changes = MembershipChanges(session)
        self._heard_in = session.membership.generation
        self._exchanged: dict[int, int] = {}  # by scope: the last generation in which one was exchanged
        self._planned = 0  # the newest generation that all have agreed to enter
        self._standing = Standing(whole=not session.newcomer, between=False, laps=0)
        self._lap: int | None = None  # after which newcomers that wait in this generation are let in
        # Models that ranks exchange at the same moments, and those that each exchanges at moments of its own.
        self._in_step: weakref.WeakSet[object] = weakref.WeakSet()
        self._out_of_step: weakref.WeakKeyDictionary[OutOfStep, None] = weakref.WeakKeyDictionary()  # in order
        self.some_were_out_of_step = False
        self.all_wrapped = False  # as far as is known: the program trains, or communicates
        self._stands_by_in = 0  # the generation in which this member has said that it may end at any moment
        self._takes_newcomers = False  # and the daemon knows it
        self._marks = 0  # how often the program has said that a step begins
        self.part: Callable[[], None] = nothing  # communicators without newcomers go
        session.end_first(self, self._leave)

    @property
    def inside(self) -> bool:
        """True if this thread runs a unit now."""
        return self.flags.inside

    @property
    def at_any_moment(self) -> bool:
        """True if planned changes take place at any moment, as losses do: the ranks have no step in common."""
        if not self.some_were_out_of_step:  # asked in each step
            return False
        return self.all_wrapped and bool(self._out_of_step) and not self._in_step

    def note(self, model: OutOfStep, in_step: bool) -> None:
        """Ranks exchange this model at the same moments, or each at moments of its own."""
        if in_step:
            self._out_of_step.pop(model, None)
            self._in_step.add(model)
        else:
            self._in_step.discard(model)
            self._out_of_step[model] = None  # where it has been: all members have the same order
            self.some_were_out_of_step = True

    def forget(self, model: OutOfStep) -> None:
        """Removes a model that is exchanged no more."""
        self._in_step.discard(model)
        self._out_of_step.pop(model, None)

    def together(
        self,
        scope: int,
        members: Callable[[], Members],
        attempt: Callable[[], T],
        show: Callable[[], None] = nothing,
        numbering: Numbering | None = None,
    ) -> T:
        """Runs ``attempt`` as a unit, and returns what it returned. ``show`` is called when it counts."""
        unit = Unit(self, scope, members, numbering=numbering)
        while True:
            with unit:
                if not unit.settled:
                    found = attempt()
                unit.vote()
                show()
                return found

    def exchanged_in(self, scope: int) -> bool:
        """Returns True if a unit of this scope has been exchanged in the present generation."""
        return self._exchanged.get(scope) == self._session.membership.generation

    def end(self, scope: int) -> None:
        """No unit of this scope will come."""
        self._ledger.end(scope)
        self._exchanged.pop(scope, None)

    def _leave(self) -> None:
        # Ranks leave together: one that has seen the end of the last unit, and is gone, could not tell the others.
        self.together(0, lambda: active_members(self._session.membership), nothing)

    # Changes of membership

    def begin(self) -> None:
        """Enters the present generation with the others, where members were lost before this process joined. Waits for
        them: all tell each other how far they are."""
        membership = self._session.membership
        if membership.lobby:  # newcomers enter when they are let in
            return
        if self._session.connection.generation_is_over():
            self.recover(membership.generation)
        elif membership.later:
            self._heard_in = 0
            self.recover(self._heard_in)

    def recover(self, generation: int) -> None:
        """After Regrouped in ``generation``: enters the next one, where that has not been done since, hears how far
        all members are, and comes on common ground with them. Raises CommunicationError when the job is over."""
        self._enter_next(generation)
        self.present()

    def present(self) -> int:
        """The newest generation whose operations may be submitted. In it, models of this thread that ranks exchange at
        moments of their own have begun anew, in the same order on all members.

        That is done before this thread communicates in that generation, because it waits for all members."""
        flags, connection = self.flags, self._session.connection
        while True:
            generation = connection.settled
            # Members don't wait for a newcomer.
            if flags.caught_up_in == generation or flags.catches_up or self._session.newcomer:
                return generation
            self._catch_up(generation)

    def _catch_up(self, generation: int) -> None:
        flags, thread = self.flags, threading.get_ident()
        flags.caught_up_in = generation
        inside, flags.inside, flags.catches_up = flags.inside, False, True
        try:
            # A list, no generator: all are asked, also after the first that did.
            while any([one.begin_anew_together() for one in list(self._out_of_step) if one.thread == thread]):
                pass
        finally:
            flags.inside, flags.catches_up = inside, False

    def _enter_next(self, generation: int) -> None:
        """The first of several threads does it, and the others find it done."""
        with self._flags_under_way, self.calm, self._session.connection.entering():
            while not self._enter_once(generation):  # a generation that ended meanwhile has a successor
                generation = self._session.membership.generation

    def _enter_once(self, generation: int) -> bool:
        """False: the next one has ended, or there is another one, meanwhile."""
        try:
            if self._session.membership.generation == generation:
                self._session.enter()
            while self._heard_in != self._session.membership.generation or self._due():
                self._hear()
            return self._stood_by()
        except Regrouped as error:  # somebody was lost meanwhile
            LOG.debug("Generation %d ended: %s", self._session.membership.generation, error)
            return False
        except Unfit as error:
            self._give_up(str(error))
        except Exception as error:  # a state that this newcomer can't take: the others wait for it
            if not self._session.newcomer or isinstance(error, CommunicationError):
                raise
            traceback.print_exc()
            self._give_up(repr(error))

    def _stand_by(self) -> None:
        """Tells the daemon that this member waits for no planned change, where changes take place at any moment. So it
        holds up no member that waits for one while this one waits for an exchange with it."""
        if not self.at_any_moment or self._stands_by_in == self._session.membership.generation:
            return
        with self.calm:
            generation, stood_by = self._session.membership.generation, self._stood_by()
        if not stood_by:
            self.recover(generation)

    def _stood_by(self) -> bool:
        """Tells the daemon that this member stands by, once in a generation. False if the next has begun already."""
        generation = self._session.membership.generation
        if not self.at_any_moment or self._session.newcomer or self._stands_by_in == generation:
            return True
        self._stands_by_in = generation
        return not self._session.connection.stand_by()

    def take_newcomers(self) -> None:
        """The program can take newcomers: the daemon is told, once."""
        if not (self._takes_newcomers or self._session.newcomer):
            self._session.take_newcomers()
        self._takes_newcomers = True

    def between_steps(self, marked: bool = True) -> None:
        """Carries out planned changes. Called when the optimizers have ended a step, and nothing of the next has begun.
        ``marked``: the program, or its sampler, says so; when it does so again and again, other places are ignored."""
        self.all_wrapped = True
        self._marks += marked
        if self._marks > 1 and not marked:
            return
        if self.at_any_moment:  # each follows when it sees a plan
            self._planned = max(self._planned, self._session.connection.planned())
            self._stand_by()
        self._standing = self._standing._replace(between=True)
        try:
            generation = self._session.membership.generation
            if self._planned > generation:
                self.changes.tell()
                self.recover(generation)
            elif self._due():
                self.recover(-1)  # -1 is no generation: none is entered, and newcomers are heard
        finally:
            laps = self._standing.laps
            self._standing = self._standing._replace(between=False, laps=laps + 1)
        self.present()
        if self.changes.told_in != self._session.membership.generation:
            self.changes.tell()

    def join(self, marked: bool = False) -> None:
        """On a newcomer: waits until it is let in, and has the state of the others. Others return at once. ``marked``:
        here a step begins."""
        if not self._session.newcomer:
            return
        LOG.info("Member %d waits to be let in.", self._session.membership.member)
        self._standing = self._standing._replace(between=True)
        while self._session.newcomer:
            self.recover(self._session.membership.generation)
        laps = self._standing.laps + (marked and self._marks > 1)
        self._standing = self._standing._replace(between=False, laps=laps)
        self._session.take_newcomers()  # from now on its end is that of a member
        self.changes.tell()

    def _due(self) -> bool:
        """Returns True if newcomers are let in here: they wait for this member, or it waits for others."""
        if self._lap is None or not self._standing.between:
            return False
        return self._session.newcomer or self._standing.laps >= self._lap

    def _hear(self) -> None:
        session, generation = self._session, self._session.membership.generation
        first = self._heard_in != generation
        session.companion.leave()  # frees ranks that wait for this one in torch.distributed
        rows = call_the_roll(session, self._row())
        outcome = settle({member: row.standing for member, row in rows.items()})
        whole = {member: row for member, row in rows.items() if member not in outcome.newcomers}
        if session.newcomer and session.membership.member in whole:
            self._come_in(whole)
        self._ledger.hear(row.units for row in whole.values())
        self._lap = outcome.lap if outcome.newcomers and not outcome.copies else None
        if outcome.copies:
            self._let_in(outcome, whole, first)
        elif not session.newcomer:
            session.take_part(outcome.newcomers)
        if not session.newcomer and (first or outcome.copies):
            members = [session.membership.members[rank] for rank in session.membership.active]
            told = {member: (row.given, row.followers) for member, row in whole.items()}
            change = self.followers.hear(told, members, generation)
            session.weigh_batch(session.weights.batch * change, change)
            session.companion.renew([rows[member].offer for member in members])
            session.renew()
        self._heard_in = generation
        LOG.info("Generation %d: rank %d of %d.", generation, session.membership.rank, session.membership.world_size)

    def _row(self) -> Row:
        if self._session.newcomer:
            return Row(self._standing, b"", {}, {}, "")
        offer = self._session.companion.offer()
        standing = self._standing._replace(between=self._standing.between or self.at_any_moment)
        return Row(standing, self._ledger.tell(), self.followers.tell(), self.followers.tell_given(), offer)

    def _let_in(self, outcome: Outcome, whole: dict[int, Row], first: bool) -> None:
        """Newcomers get the state. All others are between the same two steps."""
        session, generation = self._session, self._session.membership.generation
        if not (first or session.newcomer):
            self._devices.part()
            self.part()
        ranks = [rank for rank, member in enumerate(session.membership.members) if member in whole]
        extra = {"told": self.changes.world_size, "marks": self._marks, "steps": session.statistics.done}
        session.take_part(frozenset())
        told = self.admission.run(self.followers, extra, ranks)
        self._standing = self._standing._replace(laps=outcome.lap, ready=generation)
        if session.newcomer:
            self.changes.world_size, self._marks = told["told"], told["marks"]
            session.statistics.before = told["steps"]
        self.flags.exchange(active_members(session.membership))
        self._standing = self._standing._replace(let_in=generation)
        if session.newcomer:
            self._come_in(whole)

    def _come_in(self, whole: dict[int, Row]) -> None:
        """Makes this newcomer, which holds the state now, a member with the past that these members have told."""
        self._session.newcomer = False
        self._standing = self._standing._replace(whole=True)
        self._ledger.begin_with(row.units for row in whole.values())

    def _give_up(self, words: str) -> NoReturn:
        """Ends this newcomer, which can't join, at once, because the others wait for it."""
        member = self._session.membership.member
        print(f"bagua: member {member} can't join the job, which goes on without it. {words}", file=sys.stderr)
        sys.stdout.flush()  # ``os._exit`` flushes nothing
        sys.stderr.flush()
        os._exit(1)  # no handlers run: the others wait for the end of this process


def units(session: Session) -> Units:
    """Returns the object of this session."""
    return session.keep(Units)
