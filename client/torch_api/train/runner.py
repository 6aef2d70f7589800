"""Compiles the plans of a model's buckets into executions, and owns the communicators that they use."""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from bagua.algorithms import AllReduce, Broadcast, Local, Neighbours
from bagua.algorithms.plan import EVERYONE, GRADIENT, HOST, Over, Step
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.commit.retry import Units, nothing, units
from bagua.torch_api.comm.commit.vote import Flags
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import Communicators, communicators
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.comm.members import Members
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.join.connection import Connection, Record, Regrouped, Times
from bagua.torch_api.join.session import Session
from bagua.torch_api.train.bucket import Allocate, PlanBucket
from bagua.torch_api.train.dataflow import tail_path
from bagua.torch_api.train.device_twins import make_twins
from bagua.torch_api.train.execution import (
    Action,
    AllIn,
    Execution,
    Phase,
    Submit,
    Tickets,
    Work,
    join_all,
)
from bagua.torch_api.train.steps import (
    AllReduceAction,
    BroadcastAction,
    EverywhereAction,
    NeighboursAction,
    NewTranscoder,
)
from bagua.torch_api.train.transcoding import Transcoder
from bagua.torch_api.train.undo import HeldExecution, Undo

T = TypeVar("T")

# Numbers of residuals are given once, by communicator. Its members set their plans in the same order, and so agree.
# Where members have changed some may have got further: each generation has numbers of its own.
_RESIDUALS: weakref.WeakKeyDictionary[Members, tuple[int, Iterator[int]]] = weakref.WeakKeyDictionary()
RESIDUALS_OF_A_GENERATION = 1 << 16


class Runner:
    """Compiles plans, and has the communicators over which they go. One per wrapped model.

    Communicators are the model's own: their operations need no order with those of other models and of the user.

    ``repeats``: in an elastic job, what the model exchanges is repeated when members were lost. ``may_repeat``: asked
    before an exchange of weights is waited for; False: it is dropped, and ``begin_anew`` takes its place. ``settle``:
    called when a unit has been committed. ``waits``: ranks are in step where they exchange
    weights; otherwise an exchange is dropped when members are lost, and none waits for the others to commit it.
    """

    def __init__(self, session: Session, group: BaguaProcessGroup) -> None:
        self.session = session
        self.connection: Connection = session.connection
        self.allocate: Allocate = session.memory.place_empty
        self.transcoder: NewTranscoder = Transcoder
        self.chunk_kib = 0  # of all-reduces between hosts that are compiled from now on; 0: as the daemon has it
        self._device: CudaConnection | None = None
        self.repeats = session.elastic
        self._group = group
        self._places: dict[str, Communicator | None] = {}
        self._own: list[Communicator] = []
        self._own_given = 0
        self.may_repeat: Callable[[], bool] = _always
        self.begin_anew: Work = nothing
        self.settle: Work = nothing
        self.waits = True
        self._adopted = 0  # plans so far
        self._looked_at: tuple[int, Communicator | None, Sequence[PlanBucket]] = 0, None, ()
        self._in_line = False  # those have one operation each, in the order of this communicator
        self._held: weakref.WeakSet[HeldExecution] = weakref.WeakSet()
        if session.elastic:
            session.renew_with(self)

    def use_device_of(self, tensor: torch.Tensor) -> None:
        """From now on buckets lie in the memory of that tensor's CUDA device. Raises BuildError or BaguaError that
        names a missing part."""
        device = devices(self.session).of(tensor)
        self._device = self.connection = device
        self.allocate = functools.partial(device.place_empty, device=tensor.device)
        self.transcoder = functools.partial(device.transcoder, device=tensor.device)

    @property
    def clock(self) -> Callable[[], Any]:
        """When something in a step is."""
        return time.monotonic_ns if self._device is None else self._device.clock.now

    @property
    def record(self) -> Record:
        """Counts a step: times of its operations, and when waiting for them began and ended by ``clock``."""
        return self.session.statistics.add_step if self._device is None else self._device.steps.add

    @property
    def on_device(self) -> bool:
        """Whether buckets lie in device memory."""
        return self._device is not None

    @property
    def everyone(self) -> Communicator:
        """All ranks of the model, for primitives."""
        found = self._places.get(EVERYONE) or self._place(EVERYONE)
        assert found is not None
        return found

    def communicator(self, over: Over) -> Members | None:
        found = self._place(over) if isinstance(over, str) else over() or None
        return found if found is None or self._device is None else found.twin(self._device)

    def _place(self, name: str) -> Communicator | None:
        if name not in self._places:
            self._places[name] = self._new_communicator(name)
        return self._places[name]

    def _members_of(self, place: str) -> list[int]:
        hosts = self._group.hosts
        if place == EVERYONE:
            return [rank for host in hosts for rank in host]
        if place == HOST:
            return list(next(host for host in hosts if self._rank in host))
        return [host[0] for host in hosts]

    def _new_communicator(self, place: str) -> Communicator | None:
        if place == EVERYONE:
            return self._group.new_communicator(shrinks=True)
        members = self._members_of(place)
        return self._group.new_communicator(members, shrinks=True) if self._rank in members else None

    @property
    def _rank(self) -> int:
        return self.session.membership.rank

    @property
    def has_own(self) -> bool:
        """Whether ``own_communicator`` made any."""
        return bool(self._own)

    def own_communicator(self) -> Communicator:
        """Another communicator of all ranks of the model, which lives until ``release``."""
        if self._own_given == len(self._own):
            self._own.append(self._group.new_communicator(shrinks=True))
        self._own_given += 1
        return self._own[self._own_given - 1]

    def give_own_again(self) -> None:
        """The next calls of ``own_communicator`` return those that there are."""
        self._own_given = 0

    def make_twins(self, more: Iterable[Any], buckets: Sequence[PlanBucket]) -> None:
        """All ranks of the model call it together, when buckets have their plans: communicators of its own, and
        ``more``, are ready for a device. Nothing where buckets lie in ordinary memory."""
        if self._device is not None:
            make_twins(self._device, self.allocate, itertools.chain(self._own[: self._own_given], more), buckets)

    def new_residual(self, communicator: Members) -> int:
        generation = self.session.membership.generation
        if communicator not in _RESIDUALS or _RESIDUALS[communicator][0] != generation:
            first = 1 + (generation - 1) * RESIDUALS_OF_A_GENERATION
            _RESIDUALS[communicator] = generation, itertools.count(first)
        return next(_RESIDUALS[communicator][1])

    def one_host(self, communicator: Members) -> bool:
        return set(self.session.membership.local_ranks).issuperset(communicator.ranks)

    # In an elastic job

    def together(
        self, attempt: Callable[[], T], again: Work = nothing, commit: Work = nothing, steps: bool = False
    ) -> T:
        """``attempt``, then ``commit``. In an elastic job a unit of all ranks of the model: see ``Units.run``."""
        if not self.repeats:
            found = attempt()
            commit()
            return found
        made = self._communicators
        mark = made.mark()

        def begin_again() -> None:
            made.rewind(mark)
            self.give_own_again()
            again()

        everyone = self.everyone
        return self._units.run(everyone.id, lambda: self.everyone, attempt, begin_again, commit, True, steps)

    def all_in(self, running: Sequence[Execution]) -> Flags | None:
        """In a unit: before these are waited for. If all is submitted, and the flags go in the same order, they go
        along: that saves a way to the daemon and back. Returns flags that have gone."""
        everyone = self.everyone
        for execution in running:
            if not execution.is_all_in(everyone.id):
                return None
        return self._units.flags.send_early(everyone)

    def start_last(self, buckets: Sequence[PlanBucket], start: Work) -> AllIn | None:
        """Before a unit: ``start`` submits the last of these. If each has one operation, and the flags go in the same
        order, they go with it. Returns what ``join_all`` is to ask in this unit. None: nothing was submitted, or it is
        lost."""
        everyone, running = self._places.get(EVERYONE), self._units
        flags = running.flags
        if everyone is None or flags.inside or running.some_were_out_of_step:
            return None
        if self._looked_at != (self._adopted, everyone, buckets):
            self._looked_at = self._adopted, everyone, buckets
            self._in_line = all(_only_among(everyone, bucket.execution.single) for bucket in buckets)
        last = buckets[-1].execution
        return flags.those if self._in_line and flags.send_along(everyone, last, start) else None

    def drop_flags(self) -> None:
        """The unit for which ``start_last`` has sent them has not begun."""
        self._units.flags.drop()

    # Those of the session, asked for once: not in each step.

    @functools.cached_property
    def _units(self) -> Units:
        return units(self.session)

    @functools.cached_property
    def _communicators(self) -> Communicators:
        return communicators(self.session)

    def join(self, buckets: Sequence[PlanBucket]) -> list[Times]:
        """Waits for those of the buckets that have been started, and runs the rest of their plans, in an order that is
        the same on all ranks; in an elastic job as a unit. Returns the times of the operations."""
        if not self.repeats:
            return join_all(buckets)
        begun = [bucket for bucket in buckets if bucket.execution.started]

        def attempt() -> list[Times]:
            if any(bucket.execution.lost for bucket in begun):
                again()
            if not self.may_repeat():
                again()
                self.begin_anew()
                return []
            for bucket in begun:
                if not bucket.execution.started:
                    bucket.start()
            return join_all(begun, self.all_in)

        def again() -> None:
            for bucket in begun:
                bucket.execution.rewind()

        def commit() -> None:
            for bucket in begun:
                bucket.execution.conclude()
            self.settle()

        if not begun:
            return []
        return self.together(attempt, again, commit, steps=True) if self.waits else self._join_alone(begun)

    def _join_alone(self, begun: Sequence[PlanBucket]) -> list[Times]:
        """Where ranks are not in step: what a loss has cut off is dropped."""
        generation = self.session.connection.settled
        times: list[Times] = []
        try:
            if not any(bucket.execution.lost for bucket in begun):
                times = join_all(begun)
                devices(self.session).await_results()
            elif any(bucket.execution.ended for bucket in begun):
                raise Regrouped("An exchange could not begin.")
        except Regrouped:
            self._units.recover(generation)
        for bucket in begun:
            if not bucket.execution.lost:
                bucket.execution.conclude()
            bucket.execution.rewind()
        return times

    def renew(self) -> None:
        """In a new generation: what is under way is to be started again."""
        for execution in list(self._held):
            execution.renew()
        for place, found in list(self._places.items()):
            members = self._members_of(place)
            if found is not None:
                found.renew_ranks()
            if found is None or found.ranks != tuple(members):  # a host has another first rank
                del self._places[place]
                if found is not None:
                    found.destroy()

    def _may_begin(self) -> bool:
        """Whether an exchange of weights may begin before it is joined. Not in a new generation until a unit was
        exchanged there: members may be at different moments of their step, and would begin in different orders."""
        running = self._units
        if running.inside:
            return True
        return self.may_repeat() and (not self.waits or running.exchanged_in(self.everyone.id))

    # Newcomers

    @property
    def grows(self) -> bool:
        """Whether newcomers become ranks of the model."""
        return self.repeats and self._group.grows

    @property
    def numbers(self) -> list[int]:
        """Of the communicators of all ranks of the model: that of its units, then those of the algorithm's own."""
        return [self.everyone.id, *(one.id for one in self._own)]

    def follow(self, numbers: Sequence[int]) -> None:
        """On a newcomer: communicators become those of the other members, which they have under these numbers."""
        self._group.renew()
        for place in [place for place in self._places if place != EVERYONE]:
            del self._places[place]
        while len(self._own) < len(numbers) - 1:
            self._own.append(self._group.new_communicator(shrinks=True))
            self._own[-1].part()  # it is made when all are
        while len(self._own) > len(numbers) - 1:
            self._own.pop().destroy()
        for one, number in zip((self.everyone, *self._own), numbers, strict=True):
            one.renumber(number)
        self._own_given = 0

    def forget_residuals(self) -> None:
        """On a newcomer, when buckets have the numbers of the others: later ones follow from the generation alone."""
        for one in (self.everyone, *self._own):
            _RESIDUALS.pop(one, None)

    def release(self) -> None:
        """Gives communicators back, and with them the residuals of error feedback. Later uses make new ones."""
        for communicator in (*self._places.values(), *self._own):
            if communicator is not None:
                communicator.destroy()
        self._looked_at = 0, None, ()
        self._places.clear()
        self._own.clear()
        self._own_given = 0

    def adopt(self, bucket: PlanBucket) -> None:
        """Makes the bucket ready to run. Raises BaguaError if it has no plan."""
        if bucket.plan is None:
            raise BaguaError(
                f"Bucket {bucket.name} has no plan: the algorithm's init_operations did not give it one. [BG306]"
            )
        self._adopted += 1
        path = tail_path(bucket.plan) if bucket.room else ()
        phases: list[Phase] = []
        work: list[Work] = [bucket.refresh] if type(bucket).refresh is not PlanBucket.refresh else []
        for number, step in enumerate(bucket.plan.steps):
            if isinstance(step, Local):
                work.append(functools.partial(_run_local, bucket, step))
                continue
            carried = bucket.room if number in path else 0
            action = self._action(bucket, step, carried, first=bool(path) and number == path[0])
            phases.append((work, _Guarded(bucket, step, action) if bucket.guarded else action))
            work = []
        if work:
            phases.append((work, None))
        if not (self.repeats and bucket.repeats):
            bucket.execution = Execution(bucket.name, phases, self.connection)
            return
        eager = _always if bucket.starts_alone else self._may_begin
        undo, steady = Undo(bucket, bucket.plan), self.session.connection.steady
        held = HeldExecution(bucket.name, phases, self.connection, undo, eager, steady)
        self._held.add(held)
        bucket.execution, bucket.join_buckets = held, self.join

    def _action(self, bucket: PlanBucket, step: Step, carried: int, first: bool) -> Action:
        if isinstance(step, Broadcast):
            return BroadcastAction(self, bucket, step, carried)
        if isinstance(step, Neighbours):
            return NeighboursAction(self, bucket, step)
        assert isinstance(step, AllReduce)
        if step.everywhere and bucket.dtype is torch.float32:
            return EverywhereAction(self, bucket, step, carried, first)
        # Members of a device's communicator wait for each other as it is made: in a step, where none can be missing.
        # In an elastic job only that of all ranks stays the same one, and on a device not even that.
        everyone, on_host = step.over == EVERYONE, self._device is None
        early = isinstance(step.over, str) and (everyone and on_host if self.repeats else everyone or on_host)
        fixed = self.communicator(step.over) if early else None
        if fixed is not None and (not first or step.src == GRADIENT):
            return AllReduceAction(self, bucket, step, carried).among(fixed)
        return AllReduceAction(self, bucket, step, carried, first)


def _only_among(members: Members, single: Submit | None) -> bool:
    return single is not None and single.members is members


class _Guarded(Action):
    """A step on a bucket that wants to know when steps begin and end."""

    def __init__(self, bucket: PlanBucket, step: Step, action: Action) -> None:
        self._bucket = bucket
        self._step = step
        self._action = action
        self._takes_part = False
        self.finish = self._finish
        self.commit = self._commit
        for name in ("residual", "follow", "shared", "own", "in_engine", "number_among", "follow_among", "count"):
            setattr(self, name, getattr(action, name))

    @property
    def comm(self) -> int | None:
        return self._action.comm

    def begin(self) -> Tickets | None:
        self._bucket.open(self._step)
        tickets = self._action.begin()
        self._takes_part = tickets is not None
        return tickets

    def _commit(self) -> None:
        if self._action.commit is not None:
            self._action.commit()

    def _finish(self) -> None:
        if self._action.finish is not None:
            self._action.finish()
        self._bucket.shut(self._step, changed=self._takes_part)


def _always() -> bool:
    return True


def _run_local(bucket: PlanBucket, step: Local) -> None:
    with torch.no_grad():
        if not bucket.guarded:
            step.run(bucket)
            return
        bucket.open(step)
        step.run(bucket)
        bucket.shut(step, changed=True)
