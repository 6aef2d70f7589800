"""Schedules buckets of registered tensors, as the original's backend does for one model."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from bagua.base.errors import BaguaError, MembershipChanged
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.comm.groups import _get_default_group
from bagua.torch_api.compat.bucket import BaguaBucket
from bagua.torch_api.compat.registration import BackendTensor, Registration, registration
from bagua.torch_api.cuda.devices import devices
from bagua.torch_api.job.connection import Regrouped
from bagua.torch_api.job.session import current
from bagua.torch_api.step.execution import join_all
from bagua.torch_api.step.runner import Runner
from bagua.torch_api.train.model import DistributedModel


class Backend:
    """Runs the operations of registered buckets in their order: the first one when all its tensors are marked ready,
    then the next one, round and round.

    A bucket's first operation that communicates is under way when its last tensor has been marked. The rest is carried
    out by ``wait_pending_comm_ops``, in the thread that calls it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.RLock()  # guards the fields below; not held while waiting
        self._buckets: list[BaguaBucket] = []
        self._turn = 0  # of the bucket with this number
        self._running: list[BaguaBucket] = []
        self._left = 0  # buckets that this backward pass has not started, if it marked any tensor
        self._in_pass = False
        self._runners: dict[torch.device, Runner] = {}
        self._ddp: Callable[[], DistributedModel | None] = lambda: None

    def serve(self, ddp: DistributedModel) -> None:
        """The model whose gradients are marked here, too."""
        self._ddp = weakref.ref(ddp)  # weak: backends outlive models, and models hold their backend

    @property
    def idle(self) -> bool:
        """True if no buckets are registered."""
        return not self._buckets

    def register_ordered_buckets(self, buckets: Sequence[BaguaBucket]) -> None:
        """Registers these buckets (or their ``backend_bucket``), in this order, in place of those registered before.

        Raises BaguaError if some of those are at work.
        """
        with self._lock:
            if self._running:
                raise BaguaError(
                    f"Buckets of {self.name} are at work: call wait_pending_comm_ops() before registering others. "
                    "[BG411]"
                )
            for bucket in buckets:
                if bucket.runner is None:
                    bucket.attach(self._own_runner(bucket))
                bucket.backend = self
                bucket.mark_none()
            self._buckets, self._turn = list(buckets), 0
            self._in_pass = False

    def forget(self) -> None:
        """Forgets all buckets."""
        with self._lock:
            self._running.clear()
            self._buckets, self._turn = [], 0
            self._in_pass = False

    def abandon(self) -> bool:
        """Forgets a backward pass that ended by an exception. True if some of its buckets were at work already."""
        with self._lock:
            if not self._in_pass:
                return False
            self._in_pass = False
            running, self._running = self._running, []
            count = len(self._buckets)
            # Other ranks begin the pass at the same bucket.
            self._turn = (self._turn + self._left) % count  # where the pass began
            for bucket in self._buckets:
                bucket.mark_none()
        for bucket in running:
            bucket.execution.abandon()
        return self._left < count

    def mark_communication_ready(self, tensor: BackendTensor, ready_event: int = 0) -> None:
        """``tensor.bagua_backend_tensor()`` may be communicated. ``ready_event``: accepted for programs that pass a
        CUDA event."""
        self.mark(tensor.registration)

    def mark(self, known: Registration) -> None:
        """Marks the tensor of this registration as ready. Raises BaguaError if it is in no bucket of this model."""
        bucket = known.bucket()
        ddp = self._ddp()
        with self._lock:
            if isinstance(bucket, BaguaBucket) and bucket in self._buckets:
                if ddp is not None and ddp.in_backward and not self._in_pass:
                    self._in_pass, self._left = True, len(self._buckets)
                bucket.mark(known)
                while not self._front.pending:
                    self._start_front()
                return
        if bucket is None or ddp is None:
            raise BaguaError(
                f"Tensor {known.name!r} is in no bucket of {self.name}: register its bucket first "
                "(register_ordered_buckets, or with_bagua), and keep a reference to it. [BG411]"
            )
        ddp.mark_gradient(known.name, known.owner)

    def mark_parameter(self, parameter: torch.Tensor) -> bool:
        """Marks it, if it is in a registered bucket; False if not."""
        if self.idle:
            return False
        known = registration(parameter)
        if known is None or known.bucket() not in self._buckets:
            return False
        self.mark(known)
        return True

    def wait_pending_comm_ops(self) -> int:
        """Waits for all operations that have begun, and carries out the rest of them. Returns how many registered
        buckets were at work. Raises errors of Python operations, and CommunicationError.

        In the hook at the end of a backward pass of a model it acts like ``finish_backward``.
        """
        ddp = self._ddp()
        if ddp is not None:
            ddp.finish_gradients()
        return self.finish()

    def finish(self) -> int:
        """Does the same for registered buckets alone. At the end of a backward pass that marked any tensor, buckets
        that are not full go, too: tensors without a gradient take part as they are. On other ranks they may have one.
        """
        if not (self._in_pass or self._running):
            return 0
        with self._lock:
            if self._in_pass:
                self._in_pass = False
                for _ in range(self._left):
                    self._start_front()
            running, self._running = self._running, []
        with self._told_of_losses(running):
            join_all(running)
            if running:
                devices(current()).await_results()  # on a device ``join_all`` returns before results are there
        return len(running)

    @property
    def _front(self) -> BaguaBucket:
        return self._buckets[self._turn]

    def _start_front(self) -> None:
        """Starts the bucket whose turn it is; after the last one it is the first one's again."""
        if self._front in self._running:  # full again before anybody waited
            running, self._running = self._running, []
            with self._told_of_losses(running):
                join_all(running)
        bucket = self._front
        self._turn = (self._turn + 1) % len(self._buckets)
        bucket.mark_none()
        self._left -= 1
        self._running.append(bucket)
        with self._told_of_losses(self._running):
            bucket.start()

    @contextmanager
    def _told_of_losses(self, running: Sequence[BaguaBucket]) -> Iterator[None]:
        """Raises MembershipChanged after a loss in an elastic job, when the rank is in the next generation, and the
        next round may begin. ``running``: buckets that are at work."""
        session = current()
        generation = session.connection.settled
        try:
            yield
        except Regrouped as error:
            with self._lock:
                self._running, self._in_pass, self._turn = [], False, 0
                for bucket in self._buckets:
                    bucket.mark_none()
            for bucket in running:
                bucket.execution.abandon()
            following = units(session)
            if following.inside:  # the unit repeats it
                raise
            following.recover(generation)
            following.changes.tell()
            raise MembershipChanged(
                f"{error} The job goes on without it. Operations on registered tensors (append_... of a BaguaBucket) "
                "are not repeated by themselves, and tensors may hold parts of a result: all ranks that are left run "
                "the step again, or go on with the next one. [BG508]"
            ) from None

    def _own_runner(self, bucket: BaguaBucket) -> Runner:
        session = current()
        found = self._runners.get(bucket.device)
        if found is None or found.session is not session:
            found = self._runners[bucket.device] = Runner(session, _get_default_group())
            if bucket.on_device:
                found.use_device_of(bucket.tensors[0])
        return found


_BACKENDS: weakref.WeakValueDictionary[str, Backend] = weakref.WeakValueDictionary()


def get_backend(model_name: str) -> Backend:
    """The backend of the model of that name (``model.bagua_module_name``), the same one each time as long as somebody
    holds it: a wrapped model does, and so do registered buckets."""
    found = _BACKENDS.get(model_name)
    if found is None:
        found = _BACKENDS[model_name] = Backend(model_name)
    return found
