"""Compiles the plans of a model's buckets into executions, and owns the communicators that they use."""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bagua.algorithms import AllReduce, Broadcast, Local, Neighbours
from bagua.algorithms.plan import EVERYONE, GRADIENT, HOST, Over, Step
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.comm.members import Members
from bagua.torch_api.cuda.connection import CudaConnection
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.join.connection import Connection, Times
from bagua.torch_api.join.session import Session
from bagua.torch_api.train.bucket import Allocate, PlanBucket
from bagua.torch_api.train.dataflow import tail_path
from bagua.torch_api.train.execution import Action, Execution, Phase, Tickets, Work
from bagua.torch_api.train.steps import (
    AllReduceAction,
    BroadcastAction,
    EverywhereAction,
    NeighboursAction,
    NewTranscoder,
)
from bagua.torch_api.train.transcoding import Transcoder

# Numbers of residuals are given once, by communicator. Its members set their plans in the same order, and so agree.
_RESIDUALS: weakref.WeakKeyDictionary[Members, Iterator[int]] = weakref.WeakKeyDictionary()


class Runner:
    """Compiles plans, and has the communicators over which they go. One per wrapped model.

    Communicators are the model's own: their operations need no order with those of other models and of the user.
    """

    def __init__(self, session: Session, group: BaguaProcessGroup) -> None:
        self.session = session
        self.connection: Connection = session.connection
        self.allocate: Allocate = session.memory.place_empty
        self.transcoder: NewTranscoder = Transcoder
        self._device: CudaConnection | None = None
        self._group = group
        self._rank = session.membership.rank
        self._local = frozenset(session.membership.local_ranks)
        self._places: dict[str, Communicator | None] = {}
        self._own: list[Communicator] = []

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
    def record(self) -> Callable[[Sequence[Times], Any, Any], None]:
        """Counts a step: times of its operations, and when waiting for them began and ended by ``clock``."""
        return self.session.statistics.add_step if self._device is None else self._device.steps.add

    @property
    def on_device(self) -> bool:
        """Whether buckets lie in device memory."""
        return self._device is not None

    @property
    def everyone(self) -> Communicator:
        """All ranks of the model, for primitives."""
        found = self._place(EVERYONE)
        assert found is not None
        return found

    def communicator(self, over: Over) -> Members | None:
        """See ``Surroundings``."""
        found = self._place(over) if isinstance(over, str) else over() or None
        return found if found is None or self._device is None else found.twin(self._device)

    def _place(self, name: str) -> Communicator | None:
        if name not in self._places:
            self._places[name] = self._new_communicator(name)
        return self._places[name]

    def _new_communicator(self, place: str) -> Communicator | None:
        hosts = self._group.hosts
        if place == EVERYONE:
            members = [rank for host in hosts for rank in host]
        elif place == HOST:
            members = list(next(host for host in hosts if self._rank in host))
        else:
            members = [host[0] for host in hosts]
        return self._group.new_communicator(members) if self._rank in members else None

    @property
    def has_own(self) -> bool:
        """Whether ``own_communicator`` made any."""
        return bool(self._own)

    def own_communicator(self) -> Communicator:
        """Another communicator of all ranks of the model, which lives until ``release``."""
        self._own.append(self._group.new_communicator())
        return self._own[-1]

    def new_residual(self, communicator: Members) -> int:
        """See ``Surroundings``."""
        return next(_RESIDUALS.setdefault(communicator, itertools.count(1)))

    def one_host(self, communicator: Members) -> bool:
        """See ``Surroundings``."""
        return self._local.issuperset(communicator.ranks)

    def release(self) -> None:
        """Gives communicators back, and with them the residuals of error feedback. Later uses make new ones."""
        for communicator in (*self._places.values(), *self._own):
            if communicator is not None:
                communicator.destroy()
        self._places.clear()
        self._own.clear()

    def adopt(self, bucket: PlanBucket) -> None:
        """Makes the bucket ready to run. Raises BaguaError if it has no plan."""
        if bucket.plan is None:
            raise BaguaError(f"Bucket {bucket.name} has no plan: the algorithm's init_operations did not give it one.")
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
        bucket.execution = Execution(bucket.name, phases, self.connection)

    def _action(self, bucket: PlanBucket, step: Step, carried: int, first: bool) -> Action:
        if isinstance(step, Broadcast):
            return BroadcastAction(self, bucket, step, carried)
        if isinstance(step, Neighbours):
            return NeighboursAction(self, bucket, step)
        assert isinstance(step, AllReduce)
        if step.everywhere and bucket.dtype is torch.float32:
            return EverywhereAction(self, bucket, step, carried, first)
        # Members of a device's communicator wait for each other as it is made: in a step, where none can be missing.
        early = isinstance(step.over, str) and (self._device is None or step.over == EVERYONE)
        fixed = self.communicator(step.over) if early else None
        if fixed is not None and (not first or step.src == GRADIENT):
            return AllReduceAction(self, bucket, step, carried).among(fixed)
        return AllReduceAction(self, bucket, step, carried, first)


class _Guarded:
    """A step on a bucket that wants to know when steps begin and end."""

    def __init__(self, bucket: PlanBucket, step: Step, action: Action) -> None:
        self._bucket = bucket
        self._step = step
        self._action = action
        self._takes_part = False
        self.finish: Work | None = self._finish

    def begin(self) -> Tickets | None:
        """See ``Action``."""
        self._bucket.open(self._step)
        tickets = self._action.begin()
        self._takes_part = tickets is not None
        return tickets

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
