"""Operations of this rank, and its connection to the core in the node daemon: a channel in shared memory."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, Protocol, TypedDict, TypeVar, Unpack

from bagua import csrc
from bagua.base.errors import BuildError, CommunicationError, ConfigError, MembershipChanged, ServiceError
from bagua.torch_api.job import environment
from bagua.torch_api.job.daemon import Admission, Membership

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from bagua.csrc import core

LOG = logging.getLogger("bagua")
T = TypeVar("T")

FIRST_WARNING_S = 30.0
WARNING_EVERY_S = 60.0
LOOK_AGAIN_S = 0.001

Times = tuple[int, int, int]
Record = Callable[[Sequence[Times], Any, Any], None]
"""Gets the times of a pass's operations, and when waiting for them began and ended by the clock of the model."""
Told = tuple[int, int, int]
"""Told by flags: the most batches of a member in this step; the least, below zero; and the newest generation that was
announced."""
UNTOLD: Told = (0, 0, 0)
Place = tuple[int, int]
NOWHERE: Place = (0, 0)


class Regrouped(MembershipChanged):
    """The generation has ended, and the next one has not been entered: what waits for it repeats the operation, or
    tells the program."""


class Dismissed(MembershipChanged):
    """The job goes on without this rank: it was scaled down, or leaves this node."""


class Encoding(NamedTuple):
    """Encoding in which an all-reduce of float32 crosses between hosts: see ``Rank.submit`` in csrc/core.pyi."""

    codec: int = 0
    density: int = 0
    residual: int = 0
    residual_sides: int = 0
    exact: int = 0


AS_IT_IS = Encoding()
_AS_IT_IS = AS_IT_IS._asdict()  # made once: some algorithms make requests in each step


class Operation(TypedDict):
    """The words of the core's ``Rank.submit`` that a caller of ``request`` chooses."""

    comm: int
    dtype: int
    count: int
    op: NotRequired[int]
    root: NotRequired[int]
    src: NotRequired[Place]
    dst: NotRequired[Place]
    shape: NotRequired[Sequence[int]]
    label: NotRequired[str]


class Request(Operation):
    """One operation. It may be submitted again and again."""

    kind: int
    codec: int
    density: int
    residual: int
    residual_sides: int
    exact: int
    fenced: NotRequired[bool]
    chunk_kib: NotRequired[int]
    behind: NotRequired[core.Flags]
    defer: NotRequired[bool]


def request(kind: int, *, encoding: Encoding = AS_IT_IS, **words: Unpack[Operation]) -> Request:
    """An operation for ``Connection.submit``. ``src`` and ``dst``: places that the connection's memory has."""
    crosses = _AS_IT_IS if encoding is AS_IT_IS else encoding._asdict()
    return {"kind": kind, "src": NOWHERE, "dst": NOWHERE, **words, **crosses}  # type: ignore[typeddict-item]


class Connection(Protocol):
    """Operations of this rank on one kind of memory: that of the daemon (``HostConnection``) or of one GPU
    (``cuda.connection.CudaConnection``). Every call raises CommunicationError with the core's words."""

    membership: Membership
    kinds: Mapping[str, int]
    dtypes: Mapping[str, int]
    codecs: Mapping[str, int]
    may_defer: bool
    """Requests may say ``defer``: the caller waits for the operation next, with nothing in between."""

    def create_comm(self, comm: int, ranks: Sequence[int]) -> None:
        """Makes communicator number ``comm`` of these ranks, on this rank."""
        ...

    def destroy_comm(self, comm: int) -> None:
        """Gives the communicator up: this rank will not use it any more."""
        ...

    def submit(self, request: Request) -> int:
        """Hands over one operation; returns its ticket at once."""
        ...

    def submit_out_of_step(self, request: Request) -> int:
        """Submits as ``submit``, by ranks that are not in step: nothing but ``wait`` waits for the other members, on
        any device, before all of them have submitted it."""
        ...

    def done(self, ticket: int) -> bool:
        """Returns True if ``wait`` for this operation would return, or raise, at once."""
        ...

    def abandon(self, ticket: int) -> None:
        """Nobody will wait for this operation: its place is free once it is over."""
        ...

    def wait(self, ticket: int) -> Times:
        """Waits for an operation; returns (submitted, started, done) in ns of CLOCK_MONOTONIC. Each ticket is waited
        for once."""
        ...

    def wait_all(self, tickets: Sequence[int], flags: core.Flags | None = None) -> tuple[Sequence[Times], Told]:
        """``wait`` for several, in the order in which they were submitted, and for flags behind them. Nothing where
        that can't be had, or one of them is not over well: then each is still to be waited for."""
        ...


def load_core() -> Any:
    """Returns the core, which it builds where that has not been done. Raises BuildError."""
    try:
        return csrc.load()
    except csrc.BuildError as error:
        raise BuildError(str(error)) from error


class ThreadLimits(threading.local):
    """Limits of one thread's operations. ``generation``: the one to which they belong; None: the newest that has
    settled. ``patience``: seconds until one raises. ``first_warning_s``: until a wait is logged."""

    generation: int | None = None
    patience = math.inf

    def __init__(self, first_warning_s: float) -> None:
        self.first_warning_s = first_warning_s


def maker_of_calls(module: Any) -> Callable[..., core.Call]:
    """Returns a function that makes the core's calls, and remembers them: programs repeat a few."""

    @functools.lru_cache(maxsize=1024)
    def call(
        kind: str,
        dtype: str,
        op: int = 0,
        root: int = -1,
        send_rows: int = 1,
        recv_rows: int = 1,
        together: bool = False,
        codec: str | None = None,
        density: int = 0,
    ) -> core.Call:
        made: core.Call = module.Call(
            kind=module.KINDS[kind],
            dtype=module.DTYPES[dtype],
            op=op,
            root=root,
            src_rows=send_rows,
            dst_rows=recv_rows,
            together=together,
            codec=0 if codec is None else module.CODECS[codec],
            density=density,
        )
        return made

    return call


class HostConnection:
    """Operations of this rank. Thread-safe. The core's errors come as CommunicationError with its words;
    Regrouped where the generation has ended.

    ``elastic``: that may happen in this job. ``settled``: the newest generation in which all know who is where, so that
    its operations may be submitted. ``describe_waits`` is asked when an operation takes long; its answer goes
    to the log.
    """

    may_defer = True

    def __init__(self, admission: Admission, describe_waits: Callable[[], str]) -> None:
        module = load_core()
        self.kinds: Mapping[str, int] = module.KINDS
        self.dtypes: Mapping[str, int] = module.DTYPES
        self.codecs: Mapping[str, int] = module.CODECS
        self.call = maker_of_calls(module)
        self._describe_waits = describe_waits
        self._wait_limit_s = environment.get_wait_timeout()
        self._first_warning_s = min(FIRST_WARNING_S, self._wait_limit_s)
        self._error: type[Exception] = module.CoreError
        self._kinds_of_error: dict[type[Exception], type[CommunicationError]] = {
            module.Regrouped: Regrouped,
            module.Dismissed: Dismissed,
        }
        self._checksum = module.crc32c
        with self._translated():
            self._rank: core.Rank = module.Rank(
                data_socket=admission.data_socket, token=admission.token, rank=admission.member
            )
            view = self._rank.view()
        self.settled: int = view["generation"]
        self._thread = ThreadLimits(self._first_warning_s)
        self._entered: dict[str, Any] | None = None  # a generation that ``enter`` is to return
        self._job_id = admission.job_id
        self._island_size = environment.get_island_size()
        self.passes = 0  # synchronised backward passes of wrapped models that this job has begun
        self.membership = self._membership(view)
        self.elastic: bool = view["elastic"]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except self._error as error:
            raise self._translate(error) from None

    def _translate(self, error: Exception) -> CommunicationError:
        return self._kinds_of_error.get(type(error), CommunicationError)(str(error))

    def enter(self) -> Membership:
        """Waits for the next generation, and enters it: communicators but that of all ranks are to be made again.
        Long waits are logged, with the reason, and have no limit: a job may be paused, or wait for members. Raises
        CommunicationError when the job is over, Dismissed when it goes on without this rank."""
        with self._translated():
            waited = self.first_warning_s
            found, self._entered = self._entered or self._rank.enter(waited), None
            if found is None:
                lobby = self.membership.lobby
                why = "It waits to be let in." if lobby else "It waits until all members go on together."
                found = self._wait_on(self._rank.enter, waited, more=why, ends=False)
        self.membership = self._membership(found)
        return self.membership

    # Threads: one of them enters a generation, and the others' operations are of the last one until it has settled. An
    # operation names its generation; 0: whichever it is.

    def stay_in(self, generation: int | None) -> int | None:
        """Operations of this thread belong to that generation from now on: where another one has begun they raise
        Regrouped. None: to the newest. Returns the one before, to be given back."""
        before, self._thread.generation = self._thread.generation, generation
        return before

    def _generation(self) -> int:
        """The generation of an operation that this thread submits now."""
        generation = self._thread.generation
        return self.settled if generation is None else generation

    @contextmanager
    def steady(self, generation: int | None = None) -> Iterator[None]:
        """``stay_in`` this generation, or the present one, for the time of a block."""
        before = self.stay_in(self._generation() if generation is None else generation)
        try:
            yield
        finally:
            self.stay_in(before)

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Marks a block in which this thread enters generations. At its end that of ``membership`` is settled."""
        with self.steady(0):
            yield
            # Only where the block ended well: another thread's operations stay refused.
            self.settled = self.membership.generation

    @property
    def is_steady(self) -> bool:
        """True if operations of this thread belong to one generation now."""
        return self._thread.generation is not None

    def stand_by(self) -> bool:
        """Does not wait: this rank is ready for the next generation, whatever it does when that begins. True if there
        is one already, or none will come for this rank: ``enter`` is to be called."""
        try:
            self._entered = self._rank.enter(0.0)
        except self._error:  # ``enter`` says why
            return True
        return self._entered is not None

    def generation_is_over(self) -> bool:
        """Returns True if the present generation has ended before the next one was entered, or the job has."""
        return self.elastic and bool(self._rank.error())  # members of other jobs never change: the core is not asked

    def planned(self) -> int:
        """The newest generation that was announced: all enter it after the same step."""
        return self._rank.planned()

    def asked_for_trace(self) -> int:
        """Returns another number than 0 if somebody wants the next steps recorded; see ``Rank.trace``."""
        return self._rank.trace()

    def checksum(self, memory: Buffer) -> int:
        """CRC-32C of these bytes."""
        return int(self._checksum(memory))

    def _membership(self, view: dict[str, Any]) -> Membership:
        hosts = tuple(map(tuple, view["hosts"]))
        return Membership(
            view["rank"],
            hosts,
            self._job_id,
            view["generation"],
            tuple(view["members"]),
            lobby=view["newcomer"],
            island_size=self._island_size,
        )

    @property
    def native(self) -> core.Rank:
        """The core's end, for the GPU leg, which works beside it."""
        return self._rank

    def require(self, nbytes: int) -> None:
        """Announces how much shared memory this rank will ask for. Raises ConfigError where that can't be had."""
        try:
            self._rank.require(nbytes)
        except self._error as error:
            raise ConfigError(str(error)) from None

    def alloc(self, nbytes: int, for_peers: bool = False) -> core.Segment:
        """Shared memory from the daemon. ``for_peers``: other ranks of this host may ``borrow`` it."""
        with self._translated():
            return self._rank.alloc(nbytes, for_peers)

    def borrow(self, owner: int, segment_id: int) -> core.Segment:
        """Memory that the member with this number, on this host, has made ``for_peers``."""
        with self._translated():
            return self._rank.borrow(owner, segment_id)

    def free(self, segment_id: int) -> None:
        """Gives memory back. Silent when the daemon is gone, and with it the memory."""
        try:
            self._rank.free(segment_id)
        except self._error as error:
            LOG.debug("Segment %d was not given back: %s", segment_id, error)

    def create_comm(self, comm: int, ranks: Sequence[int]) -> None:
        with self._translated():
            self._rank.create_comm(comm, ranks)

    def destroy_comm(self, comm: int) -> None:
        with self._translated():
            self._rank.destroy_comm(comm)

    def submit(self, request: Request) -> int:
        """See ``Connection``. Places are (segment, byte offset)."""
        try:
            return self._rank.submit(**request, generation=self._generation())
        except self._error as error:
            raise self._translate(error) from None

    submit_out_of_step = submit

    def send_flags(self, flags: core.Flags) -> None:
        """Submits them by themselves. With another operation: as its ``behind``."""
        try:
            self._rank.send_flags(flags, self._generation())
        except self._error as error:
            raise self._translate(error) from None

    def exchange_bytes(
        self, kind: str, src: int, dst: int, count: int, *, op: int = 0, root: int = -1, comm: int = 0
    ) -> None:
        """One operation on ``count`` bytes at addresses ``src`` and ``dst`` (0: none), to its end."""
        call = self.call(kind, "uint8", op, root, 1, 1, bool(src))
        self.transfer(call, comm, count, src, dst, (count,))

    def transfer(self, call: core.Call, comm: int, count: int, src: int, dst: int, shape: Sequence[int]) -> None:
        """One operation on tensors at any address, from submission to the end: see the core's ``Rank.transfer``. Long
        waits are logged as those of ``wait``."""
        try:
            waited = self._thread.first_warning_s
            # The usual case is one call of the core: it is over before the first warning.
            pending = self._rank.transfer(call, comm, count, src, dst, shape, waited, self._generation())
            if pending is not None:
                self._wait_on(pending.wait, waited)
        except self._error as error:
            raise self._translate(error) from None

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Operations of this thread in its block raise CommunicationError after so many seconds: they may wait for a
        process that never started, and nobody can see that die."""
        self._thread.patience, self._thread.first_warning_s = seconds, min(self._first_warning_s, seconds)
        try:
            yield
        finally:
            self._thread.patience, self._thread.first_warning_s = math.inf, self._first_warning_s

    @property
    def first_warning_s(self) -> float:
        """Seconds after which ``go_on`` is to be asked for the first time."""
        return self._thread.first_warning_s

    def go_on(self, waited: float, more: str = "", ends: bool = True) -> float:
        """Says who waits for whom, and for how many seconds this rank will wait on. ``more``: words for the log.
        Raises CommunicationError at the limit, which is ``environment.get_wait_timeout()`` at the latest if the wait
        ``ends``."""
        limit = min(self._wait_limit_s if ends else math.inf, self._thread.patience)
        try:
            who = self._describe_waits()
        except ServiceError as error:  # the daemon may be gone: the wait goes on, and the core tells when that is over
            who = f"The node daemon can't say for whom: {error}"
        waiting = " ".join(filter(None, (who, more)))
        if waited >= limit:
            hint = " BAGUA_WAIT_TIMEOUT_S sets the limit." if limit == self._wait_limit_s else ""
            raise CommunicationError(
                f"Rank {self.membership.rank} gave up after {waited:.0f} s. {waiting}{hint} [BG503]"
            )
        LOG.warning("Rank %d has waited for %.0f s. %s", self.membership.rank, waited, waiting)
        return min(WARNING_EVERY_S, limit - waited)

    def _wait_on(self, look: Callable[[float], T | None], waited: float, **words: Any) -> T:
        """Waits for the result of ``look``, which waits so many seconds for it, after ``waited`` that brought none. The
        rest is for ``go_on``."""
        while True:
            more = self.go_on(waited, **words)
            if found := look(more):
                return found
            waited += more

    def wait(self, ticket: int) -> Times:
        """See ``Connection``.

        Ends when the operation is done, or fails: the daemon fails it when a rank or host is lost. A wait longer than
        30 s is logged, with who waits for whom. After ``get_wait_timeout()`` seconds it is an error: ranks may live and
        never come (two that receive from each other).
        """
        try:
            waited = self.first_warning_s
            times = self._rank.wait(ticket, waited)
            return times or self._wait_on(lambda more: self._rank.wait(ticket, more), waited)
        except self._error as error:
            raise self._translate(error) from None

    def wait_all(self, tickets: Sequence[int], flags: core.Flags | None = None) -> tuple[Sequence[Times], Told]:
        """See ``Connection``. Long waits as with ``wait``."""
        try:
            waited = self.first_warning_s
            found = self._rank.wait_all(tickets, flags, waited)
            return found or self._wait_on(lambda more: self._rank.wait_all(tickets, flags, more), waited)
        except self._error as error:
            raise self._translate(error) from None

    def done(self, ticket: int) -> bool:
        with self._translated():
            return self._rank.done(ticket)

    def abandon(self, ticket: int) -> None:
        self._rank.abandon(ticket)

    def barrier(self, comm: int = 0, meanwhile: Callable[[], object] | None = None) -> None:
        """Returns when every member has called it. Until then ``meanwhile`` is called again and again."""
        if meanwhile is None:
            self.exchange_bytes("barrier", 0, 0, 0, comm=comm)
            return
        operation = request(self.kinds["barrier"], comm=comm, dtype=self.dtypes["uint8"], count=0)
        ticket = self.submit(operation)
        began, told = time.monotonic(), self.first_warning_s
        while not self.done(ticket):
            meanwhile()
            time.sleep(LOOK_AGAIN_S)
            if (waited := time.monotonic() - began) >= told:
                told = waited + self.go_on(waited)
        self.wait(ticket)

    def counters(self) -> dict[str, int]:
        """Counters of this host's engine."""
        return self._rank.counters()

    def note_pass(self) -> None:
        """One more backward pass of a wrapped model begins, which is synchronised. The coordinator sees by it that the
        members have made a step."""
        self.passes += 1
        self._rank.note_passes(self.passes)

    def close(self, words: str = "") -> None:
        """Tells the daemon that this rank leaves in good order. ``words``: the exception that the program is handling.
        Idempotent; in a forked child the parent's stays as it is."""
        self._rank.close(words)

    def fail(self, words: str, lost: bool) -> None:
        """``close`` of a program that ends before its time, for this reason: the job ends, too. An elastic job goes on
        where the rank is ``lost`` through no fault of the program."""
        self._rank.fail(words, lost)
