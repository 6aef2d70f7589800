"""Compiles the plans of a model's buckets into executions, and owns the communicators that they use."""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from bagua.algorithms import AllReduce, Broadcast, Local, Neighbours
from bagua.algorithms.plan import EVERYONE, GRADIENT, HOST, Over, Step
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.comm.groups import BaguaProcessGroup, _get_default_group
from bagua.torch_api.comm.members import Members, hashed_number
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.connection import Connection, Record
from bagua.torch_api.job.session import Session
from bagua.torch_api.step.actions import (
    AllReduceAction,
    BroadcastAction,
    EverywhereAction,
    NeighboursAction,
    NewTranscoder,
)
from bagua.torch_api.step.bucket import Allocate, PlanBucket
from bagua.torch_api.step.dataflow import tail_path
from bagua.torch_api.step.device_twins import make_twins
from bagua.torch_api.step.execution import (
    Action,
    Execution,
    Phase,
    Tickets,
    Work,
)
from bagua.torch_api.step.transcoding import Transcoder
from bagua.torch_api.step.undo import Undo
from bagua.torch_api.step.vote import ElasticVote, Vote

# Numbers of residuals are given once, by communicator. Its members set their plans in the same order, and so agree.
# Where members have changed some may have got further: each generation has numbers of its own.
_RESIDUALS: weakref.WeakKeyDictionary[Members, tuple[int, Iterator[int]]] = weakref.WeakKeyDictionary()
RESIDUALS_OF_A_GENERATION = 1 << 16


class Runner:
    """Compiles plans, and has the communicators over which they go. One per wrapped model.

    Communicators are the model's own: their operations need no order with those of other models and of the user.

    ``vote``: how its exchanges come to count.
    """

    def __init__(self, session: Session, group: BaguaProcessGroup) -> None:
        self.session = session
        self.connection: Connection = session.connection
        self.allocate: Allocate = session.memory.place_empty
        self.transcoder: NewTranscoder = Transcoder
        self.chunk_kib = 0  # of all-reduces between hosts that are compiled from now on; 0: as the daemon has it
        self._device: CudaConnection | None = None
        self.vote: Vote = ElasticVote(session, self) if session.elastic else Vote()
        self._group = group
        self._places: dict[str, Communicator | None] = {}
        self._all: Communicator | None = None  # see ``voters``
        self._own: list[Communicator] = []
        self._own_given = 0
        self._held: weakref.WeakSet[Execution] = weakref.WeakSet()
        if session.elastic:
            communicators(session).holders.add(self)
            session.renew_with(self)

    def use_device_of(self, tensor: torch.Tensor) -> None:
        """Places buckets in the memory of that tensor's CUDA device from now on. Raises BuildError or BaguaError that
        names a missing part."""
        device = devices(self.session).of(tensor)
        self._device = self.connection = device
        self.allocate = functools.partial(device.place_empty, device=tensor.device)
        self.transcoder = functools.partial(device.transcoder, device=tensor.device)

    @property
    def clock(self) -> Callable[[], Any]:
        """Clock of the moments of a step."""
        return time.monotonic_ns if self._device is None else self._device.clock.now

    @property
    def record(self) -> Record:
        """Counts a step: times of its operations, and when waiting for them began and ended by ``clock``."""
        return self.session.statistics.add_step if self._device is None else self._device.steps.add

    @property
    def on_device(self) -> bool:
        """True if buckets lie in device memory."""
        return self._device is not None

    @property
    def everyone(self) -> Communicator:
        """Communicator of all ranks of the model, for primitives."""
        found = self._places.get(EVERYONE) or self._place(EVERYONE)
        assert found is not None
        return found

    @property
    def voters(self) -> Communicator:
        """Communicator of all ranks whose exchanges count together. With islands more than the ranks of the model's
        shards: parts of a model must not be of different steps."""
        if self._group.place is None:
            return self.everyone
        if self._all is None:
            self._all = _get_default_group().new_communicator(shrinks=True)
        return self._all

    def communicator(self, over: Over) -> Members | None:
        found = self._place(over) if isinstance(over, str) else over() or None
        return found if found is None or self._device is None else found.twin(self._device)

    def _place(self, name: str) -> Communicator | None:
        if name in self._places:
            return self._places[name]
        found = self._places[name] = self._new_communicator(name)
        return found

    def _members_of(self, place: str) -> list[int]:
        hosts = self._group.hosts
        if place == EVERYONE:
            return [rank for host in hosts for rank in host]
        if place == HOST:
            return list(next(host for host in hosts if self._rank in host))
        return [host[0] for host in hosts]

    def _numbers_of(self, place: str) -> tuple[int, ...]:
        return tuple(communicators(self.session).numbers(self._members_of(place)))

    def _new_communicator(self, place: str) -> Communicator | None:
        if place == EVERYONE:
            return self._group.new_communicator(shrinks=True)
        members = self._members_of(place)
        if not self.session.elastic:
            return self._group.new_communicator(members, shrinks=True) if self._rank in members else None
        # Some ranks ask for it just before a loss, and others, which meet the loss, after it: the number follows from
        # the model and the members alone.
        key = f"{place} of {self.everyone.id}"  # asked on all ranks: it draws a number the first time
        if self._rank not in members:
            return None
        made = communicators(self.session).make(f"{key}: {self._numbers_of(place)}", members, shrinks=True)
        made.stream = self._group.stream
        return made

    @property
    def _rank(self) -> int:
        return self.session.membership.rank

    @property
    def has_own(self) -> bool:
        """True if ``own_communicator`` made any."""
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

    def take_back(self, made: Collection[Communicator]) -> None:
        """See ``Holder``."""
        for place, one in list(self._places.items()):  # another thread may ask for others meanwhile
            if one in made:
                self._places.pop(place, None)
        self._own = [one for one in self._own if one not in made]
        self._own_given = min(self._own_given, len(self._own))

    def make_twins(self, more: Iterable[Any], buckets: Sequence[PlanBucket]) -> None:
        """Makes communicators of its own, and ``more``, ready for a device. All ranks of the model call it together,
        when buckets have their plans. Nothing where buckets lie in ordinary memory."""
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

    def renew(self) -> None:
        """Marks what is under way in a new generation as to be started again."""
        for execution in list(self._held):
            execution.renew()
        for place, found in list(self._places.items()):
            if found is not None:
                found.renew_ranks()  # at once: other threads may ask for them
            if place != EVERYONE and (found is None or found.numbers != self._numbers_of(place)):
                self._places.pop(place, None)
                if found is not None:
                    found.destroy()

    # Newcomers

    @property
    def grows(self) -> bool:
        """True if newcomers become ranks of the model."""
        return self.vote.repeats and self._group.grows

    @property
    def numbers(self) -> list[int]:
        """Numbers of the communicators of all ranks of the model: those of its units, then those of the algorithm's
        own."""
        return [one.id for one in (*self._of_units, *self._own)]

    @property
    def _of_units(self) -> list[Communicator]:
        return [self.everyone] if self._group.place is None else [self.everyone, self.voters]

    def follow(self, numbers: Sequence[int]) -> None:
        """Takes the communicators that the other members have under these numbers. Called on a newcomer."""
        self._group.renew()
        for place in [place for place in self._places if place != EVERYONE]:
            del self._places[place]
        own = len(numbers) - len(self._of_units)
        while len(self._own) < own:
            # Under any number that no other has: it takes that of the others, and is made when all are.
            number = hashed_number(f"{len(self._own)} of newcomer {self._rank} in {self.everyone.id}")
            self._own.append(self._group.new_communicator(shrinks=True, number=number))
            self._own[-1].part()
        while len(self._own) > own:
            self._own.pop().destroy()
        for one, number in zip((*self._of_units, *self._own), numbers, strict=True):
            one.renumber(number)
        self._own_given = 0

    def forget_residuals(self) -> None:
        """Forgets the numbers of residuals, on a newcomer whose buckets have those of the others: later ones follow
        from the generation alone."""
        for one in (*self._of_units, *self._own):
            _RESIDUALS.pop(one, None)

    def release(self) -> None:
        """Gives communicators back, and with them the residuals of error feedback. Later uses make new ones."""
        for communicator in (*self._places.values(), self._all, *self._own):
            if communicator is not None:
                communicator.destroy()
        self._all = None
        self._places.clear()
        self._own.clear()
        self._own_given = 0

    def adopt(self, bucket: PlanBucket) -> None:
        """Makes the bucket ready to run. Raises BaguaError if it has no plan."""
        if bucket.plan is None:
            raise BaguaError(
                f"Bucket {bucket.name} has no plan: the algorithm's init_operations did not give it one. [BG306]"
            )
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
        if not (self.vote.repeats and bucket.repeats):
            bucket.execution = Execution(bucket.name, phases, self.connection)
            return
        undo, steady = Undo(bucket, bucket.plan), self.session.connection.steady
        bucket.execution = Execution(bucket.name, phases, self.connection, undo, steady)
        if not bucket.starts_alone:
            bucket.execution.may_begin = self.vote.may_begin
        self._held.add(bucket.execution)
        bucket.join_buckets = self.vote.join

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
        early = isinstance(step.over, str) and (everyone and on_host if self.vote.repeats else everyone or on_host)
        fixed = self.communicator(step.over) if early else None
        if fixed is not None and (not first or step.src == GRADIENT):
            return AllReduceAction(self, bucket, step, carried).among(fixed)  # one prepared request serves each step
        return AllReduceAction(self, bucket, step, carried, first)


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


def _run_local(bucket: PlanBucket, step: Local) -> None:
    with torch.no_grad():
        if not bucket.guarded:
            step.run(bucket)
            return
        bucket.open(step)
        step.run(bucket)
        bucket.shut(step, changed=True)
