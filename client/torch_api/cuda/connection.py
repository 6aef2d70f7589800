"""Connection of this rank to one GPU: operations on its memory, carried out by the GPU leg of the core.

Nothing here waits on the host but the making of communicators and, in elastic jobs, ``await_results``. An operation
begins after the current stream's work, and ``wait`` makes that stream wait. So an error comes to light at the next call
after it, not where it happened.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from bagua import csrc
from bagua.algorithms import Codec
from bagua.base.errors import BaguaError, BuildError, CommunicationError
from bagua.torch_api.cuda.gate import Gate
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.cuda.step_times import CudaSteps
from bagua.torch_api.cuda.transcoding import CudaTranscoder
from bagua.torch_api.cuda.wait_watchdog import WaitWatchdog
from bagua.torch_api.job.connection import UNTOLD, HostConnection, Place, Regrouped, Request, Times, Told
from bagua.torch_api.job.statistics import StatisticsRecorder

if TYPE_CHECKING:
    from bagua.csrc.gpu.leg import Leg

LOG = logging.getLogger("bagua")

DEVICE = -1  # First number of a ``Place`` in device memory; the second one is the address
KEPT_TICKETS = 4096  # of operations that have been waited for: so long their times are known
KERNELS = "BAGUA_DEVICE_KERNELS"
VERDICT_S, LOOK_S = 10.0, 0.02


class CudaConnection:
    """Operations of this rank on one GPU. Thread-safe. Errors of the leg come as CommunicationError with its words.

    Ranks that live and never come are given up as on the CPU (``BAGUA_WAIT_TIMEOUT_S``): the leg fails.

    In an elastic job each generation has a leg of its own: communicators of the old one were aborted together, and are
    made again when they are used. Errors come as Regrouped where the generation has ended.

    Numbers of communicators are those of twins: see ``Members.twin``.
    """

    may_defer = False  # ranks do nothing on devices by themselves

    def __init__(self, connection: HostConnection, index: int, recorder: StatisticsRecorder) -> None:
        """Opens the libraries. Raises BuildError or BaguaError that names a missing part and a remedy."""
        self.index = index
        self.connection = connection
        self.membership = connection.membership
        self.kinds: Mapping[str, int] = connection.kinds
        self.dtypes: Mapping[str, int] = connection.dtypes
        self.codecs: Mapping[str, int] = connection.codecs
        self._cuda = PORT.cuda
        module, self._core, self._no_kernels, kernels = _modules()
        self._error: type[Exception] = module.DeviceError
        # Perhaps only some of the ranks have CUDA tensors, so the leg makes no communicator by itself. Communicators
        # that block are faster, but take half a second more to be made: at each change of members.
        self._new_leg = functools.partial(
            module.Leg,
            rank=connection.native,
            device=index,
            kernels=kernels,
            world=False,
            blocking=not connection.elastic,
        )
        self._gate = Gate(connection, self.abandon)
        self._open()
        self._say_what_is_missing()
        self.clock = self._cuda.clock(index)
        self.steps = CudaSteps(recorder, self._last_times)

    def _open(self) -> None:
        self.membership = self.connection.membership
        try:
            self._leg: Leg = self._new_leg(hosts=self.membership.hosts, me=self.membership.rank)
        except self._error as error:
            if self.connection.generation_is_over():
                raise Regrouped(str(error)) from None
            raise BaguaError(f"CUDA tensors can't be communicated: {error}") from None
        self._waited: deque[int] = deque()
        self._in_use: dict[int, tuple[Place, Place]] = {}  # by ticket, until a stream waits for it
        self._comms: set[int] = set()
        self._parted = False
        first_s = self.connection.first_warning_s
        self._watchdog = WaitWatchdog(first_s, self._leg.waiting, self._go_on, self._leg.abort)

    def renew(self) -> None:
        """Makes another leg in a new generation. Tickets of the old one mean nothing any more."""
        self._give_up()
        self.steps.drop_open()
        self._open()

    def part(self) -> None:
        """Newcomers are about to be let into the present generation, which goes on with another leg (``renew``). All
        members call it before any makes a communicator with them: numbers of communicators are free for that."""
        self._give_up()
        while self._comms:
            self.connection.destroy_comm(self._comms.pop())

    def _give_up(self) -> None:
        """Closes the leg; operations under way fail."""
        words = "Members have changed: communicators of those that were there before are aborted."
        self._parted = True
        self._leg.abort(words)
        self._gate.drop(Regrouped(words))
        self._close_leg()

    def _translate(self, error: Exception) -> CommunicationError:
        """NCCL, or the device, may have failed before the engines know that a member is lost: they get some time."""
        deadline = time.monotonic() + VERDICT_S
        while not (over := self._is_over()):
            if not self.connection.elastic or not self._leg.error() or time.monotonic() >= deadline:
                break
            time.sleep(LOOK_S)
        return (Regrouped if over else CommunicationError)(str(error))

    def _is_over(self) -> bool:
        """Returns True if this leg was given up, or its generation has ended. The next one may have been entered
        already: what is under way is then abandoned, before there is another leg."""
        entered = self.connection.membership.generation
        return self._parted or entered != self.membership.generation or self.connection.generation_is_over()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns the leg's errors into CommunicationError."""
        try:
            yield
        except self._error as error:
            raise self._translate(error) from None

    def _say_what_is_missing(self) -> None:
        missing = dict(self._leg.capabilities()["why_not"])
        if self._no_kernels:
            missing["kernels"] = self._no_kernels
        if missing and self.membership.local_rank == 0:  # one rank of a host says it for all
            reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
            LOG.warning("CUDA tensors go without %s (%s). `bagua doctor` says more.", " and ".join(missing), reasons)

    def _go_on(self, waited: float, what: str) -> float:
        return self.connection.go_on(waited, more=what)

    # Communicators

    def create_comm(self, comm: int, ranks: Sequence[int]) -> None:
        """Creates a communicator. Waits for the other members, the first of which logs the route."""
        with self._translated():
            self._leg.create_comm(comm, ranks)
            self._comms.add(comm)
            if self.membership.rank == min(ranks):
                _log_route(ranks, **self._leg.report(comm))

    def destroy_comm(self, comm: int) -> None:
        """Frees a communicator. Waits for this rank's operations on it."""
        with self._translated():
            self._comms.discard(comm)
            self._leg.destroy_comm(comm)

    # Memory

    def place_empty(self, count: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, Place]:
        """A one-dimensional tensor of zeros in ordinary memory of the device, and where it lies."""
        made = torch.zeros(count, dtype=dtype, device=device)
        return made, CudaPlace(made)

    def behind(self, start: Place, nbytes: int) -> Place:
        """The place so many bytes behind one that ``place_empty`` gave; it keeps that memory, too."""
        assert isinstance(start, CudaPlace)
        return CudaPlace(start.memory, nbytes)

    def transcoder(self, codec: Codec, count: int, device: torch.device) -> CudaTranscoder:
        """An encoder of ``count`` float32 in this rank. Raises BaguaError where there are no kernels."""
        if not self._leg.capabilities()["kernels"]:
            raise BaguaError(
                f"Codec {codec.name} is to be computed on the GPU, and there is no library of kernels: "
                f"{self._no_kernels or 'it could not be opened'}. Choose everywhere=False or no codec, or install what "
                "is missing. [BG207]"
            )
        number, density = self.codecs[codec.name], codec.density_units
        length = self._core.encoded_bytes(number, count, density)
        return CudaTranscoder(self._transcode, number, density, count, length, device)

    def _transcode(self, codec: int, count: int, **what: Any) -> None:
        with self._translated():
            self._leg.transcode(codec, count, stream=self._cuda.stream(self.index), **what)

    # Operations

    def submit(self, request: Request) -> int:
        """Submits an operation, which begins after the current stream's work. Places are (DEVICE, address);
        ``comm`` is a twin's number. Raises CommunicationError, too, while the stream is captured into a CUDA graph."""
        return self._hand_over(self._leg, request, self._cuda.stream(self.index))

    def submit_out_of_step(self, request: Request) -> int:
        """Submits an operation through the gate. It begins after the current stream's work, and perhaps after more that
        follows.
        """
        return self._gate.submit(
            request, functools.partial(self._hand_over, self._leg, request, self._cuda.stream(self.index))
        )

    def _hand_over(self, leg: Leg, request: Request, stream: int) -> int:
        src, dst = request["src"], request["dst"]
        native: dict[str, Any] = {**request, "src": src[1], "dst": dst[1]}
        del native["residual_sides"]  # the leg keeps residuals of its own, of one side: its steps are not repeated
        try:
            ticket = leg.submit(**native, stream=stream)
        except self._error as error:
            raise self._translate(error) from None
        self._in_use[ticket] = src, dst  # torch must not give this memory to other tensors meanwhile
        return ticket

    def done(self, ticket: int) -> bool:
        """Returns True if the result is there, or never will be. Raises CommunicationError for an error of the
        device."""
        if ticket < 0:
            return self._gate.done(ticket, self.done)
        with self._translated():
            return self._leg.done(ticket)

    def _last_times(self, ticket: int) -> Times:
        """Returns the times of an operation that is over. Nobody asks again, so the next one gets its events."""
        with self._translated():
            times = self._leg.times(ticket)
        self._leg.release(ticket)
        return times

    def wait_all(self, tickets: Sequence[int], flags: object = None) -> tuple[Sequence[Times], Told]:
        """See ``Connection``. It can't be had on a device: each ticket is waited for by itself."""
        return (), UNTOLD

    def wait(self, ticket: int) -> Times:
        """Makes the current stream wait for the operation. Returns (ticket, 0, 0): ``CudaSteps`` learns the times
        when they are known. Nothing waits here, but for the members of an operation that was submitted out of step."""
        if ticket < 0:
            ticket = self._gate.await_ticket(ticket)
        try:
            self._leg.wait(ticket, self._cuda.stream(self.index))
        except self._error as error:
            raise self._translate(error) from None
        finally:
            self._in_use.pop(ticket, None)
        self._waited.append(ticket)
        if len(self._waited) > KEPT_TICKETS:
            self._leg.release(self._waited.popleft())
        return ticket, 0, 0

    def abandon(self, ticket: int) -> None:
        """Gives up an operation. Its memory is held until ``close``, because the operation may still write there."""
        if ticket < 0:
            self._gate.abandon(ticket)

    def await_results(self) -> None:
        """Returns when all that the current stream waits for is there: the one wait on the host in a step of an elastic
        job. Raises Regrouped if it never will be, because the generation has ended, else CommunicationError."""
        self.clock.now().await_on_host()
        words = self._leg.error()  # a failure frees the stream without results
        if words:
            raise self._translate(CommunicationError(f"{words} [BG510]"))

    def counters(self) -> dict[str, int]:
        """Returns the counters of the leg."""
        return self._leg.counters()

    def route(self, comm: int) -> str:
        """Returns how operations of a twin travel: "staged", "flat" or "hierarchical"."""
        found: str = self._leg.report(comm)["route"]
        return found

    def close(self) -> None:
        """Pending operations fail. Idempotent. Comes before the connection's."""
        self._gate.close()
        self._close_leg()

    def _close_leg(self) -> None:
        self._watchdog.stop()
        self._leg.close()


class CudaPlace(tuple[int, int]):
    """Place (DEVICE, address) in a tensor, which it keeps: torch must not give its memory to something else while the
    leg's streams, of which its allocator knows nothing, still work on it.
    """

    memory: torch.Tensor

    def __new__(cls, memory: torch.Tensor, offset: int = 0) -> CudaPlace:
        """``offset``: bytes from the beginning of the tensor."""
        place = super().__new__(cls, (DEVICE, memory.data_ptr() + offset))
        place.memory = memory
        return place


def _log_route(
    ranks: Sequence[int], route: str, impossible: Mapping[str, str], failed: Mapping[str, str], undivided: str
) -> None:
    reasons = "".join(f"; {name} is not possible: {why}" for name, why in impossible.items())
    reasons += "".join(f"; {name} could not be set up: {why}" for name, why in failed.items())
    if undivided:
        reasons += f"; NCCL enqueues by threads of its own (slower): {undivided}"
    level = logging.WARNING if failed or undivided else logging.INFO
    LOG.log(level, "CUDA tensors of ranks %s take route %s%s", list(ranks), route, reasons)


def _modules() -> tuple[Any, Any, str, str]:
    """The module of the leg, the core, why there are no kernels (empty if there are) and their path."""
    try:
        module = csrc.load_device()
    except csrc.BuildError as error:
        raise BuildError(str(error)) from error
    if KERNELS in os.environ:  # the leg reads it
        return module, csrc.load(), "", ""
    try:
        return module, csrc.load(), "", str(csrc.kernels_library())
    except csrc.BuildError as error:
        return module, csrc.load(), str(error), ""
