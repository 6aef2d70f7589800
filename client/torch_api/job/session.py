"""Session of a rank, from ``init_process_group`` to its end: connection, memory, statistics. One at a time."""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from bagua.base.errors import BaguaError, CommunicationError, ServiceError
from bagua.torch_api.job import environment
from bagua.torch_api.job.connection import Dismissed, HostConnection
from bagua.torch_api.job.daemon import Admission, DaemonClient
from bagua.torch_api.job.ending import End
from bagua.torch_api.job.progress import ProgressReporter, figures
from bagua.torch_api.job.reports import LISTENERS, Report, as_number, notify
from bagua.torch_api.job.shared_memory import SharedMemory
from bagua.torch_api.job.statistics import StatisticsRecorder

LOG = logging.getLogger("bagua")
MATE_LOST_S = 1.0  # in which a daemon hears that a rank of an island is lost
T = TypeVar("T")


class Renewable(Protocol):
    """An object that knows ranks, or has operations under way."""

    def renew(self) -> None:
        """The session has entered a new generation: operations of the old one are over, ranks are others."""
        ...


class Weighed(Protocol):
    """A model whose gradients weigh as its rank's batch does."""

    def install_weights(self) -> None:
        """Installs the hooks that weigh gradients, unless they are. Jobs whose batches are alike need none."""
        ...


class Weights(NamedTuple):
    """Weights of this rank's gradients. ``batch``: samples of its batch, divided by the mean of all ranks'.
    ``changes``: the product of all changes of such weights while a batch was in use."""

    batch: float = 1.0
    changes: float = 1.0


class Companion(Protocol):
    """Something beside the session that is made anew in each generation, at a place that one member tells the others.
    Members come to each of these calls together, in this order."""

    def leave(self) -> None:
        """Goes down, if it is up: the generation has ended, or gets other members."""
        ...

    def offer(self) -> str:
        """The words of this member for the others."""
        ...

    def renew(self, offers: Sequence[str]) -> None:
        """Comes up again. ``offers``: of each rank that takes part."""
        ...


class Session:
    """Connection, memory and bookkeeping of this rank.

    ``membership``: of the present generation. ``elastic``: the job goes on without members that it loses, in another
    generation. ``newcomer``: this rank has not been let in; the others of its generation are newcomers of its host.
    """

    def __init__(self, admission: Admission, daemon: DaemonClient) -> None:
        self.pid = os.getpid()
        self.data_socket = admission.data_socket
        self.connection = HostConnection(admission, daemon.describe_waits)
        self.membership = self.connection.membership
        self.elastic = self.connection.elastic
        self.newcomer = self.membership.lobby
        self.dismissed = False
        self.failed = False
        self.has_wrapped_a_model = False
        self.implicit = False  # torch.distributed began it, and the program has not asked for it
        self.companion: Companion  # since the session has begun (start.py)
        self.daemon = daemon
        self.weights = Weights()  # replaced as one: another thread may enter a generation
        self.weighed_models: weakref.WeakSet[Weighed] = weakref.WeakSet()
        self.memory = SharedMemory(self.connection)
        self.statistics = StatisticsRecorder()
        rank, counters = self.membership.rank, self.connection.counters
        self.progress = ProgressReporter(daemon, rank, self.statistics, counters)
        self.statistics.on_step = self.progress.step_done
        self._kept: dict[Callable[[Session], Any], Any] = {}
        self._endings: dict[object, Callable[[], None]] = {}
        self._closings: list[Callable[[], None]] = []
        self._renewed: weakref.WeakKeyDictionary[Renewable, None] = weakref.WeakKeyDictionary()

    def keep(self, make: Callable[[Session], T]) -> T:
        """The object that ``make(session)`` returned when it was first asked for. Layers above this one keep objects
        here that live as long as the session."""
        try:
            found: T = self._kept[make]
        except KeyError:
            found = self._kept[make] = make(self)
        return found

    def renew_with(self, one: Renewable) -> None:
        """``one.renew()`` is called in each new generation, as long as somebody else holds it. Those that were
        registered first come first."""
        self._renewed[one] = None

    def enter(self) -> None:
        """Waits for the job's next generation, and enters it; see ``HostConnection.enter``. Ranks, world size and
        environment are those of the new one then, and ``renew`` is to be called. Members that were in none with this
        one rest. Ends the process where the job goes on without it."""
        self.companion.leave()  # first: ranks of the next one may wait in it for this one
        before = self.membership
        known = {before.members[rank] for rank in before.active}
        try:
            entered = self.connection.enter()
        except Dismissed as error:
            self.dismissed = True
            self._endings.clear()  # an ending waits for other ranks: this one leaves alone
            print(f"bagua: member {before.member} leaves the job, which goes on without it. {error}", file=sys.stderr)
            raise SystemExit(0) from None
        self.membership = entered
        self.take_part(frozenset(entered.members) - known)
        environment.set_place(entered.variables)
        environment.show()
        self.progress.rank = entered.rank

    def take_part(self, resting: frozenset[int]) -> None:
        """Lets these members rest from now on; all others of the generation take part."""
        self.membership = self.connection.membership = replace(self.membership, resting=resting)

    def renew(self) -> None:
        """Tells all that know ranks of the generation that was entered. Raises Regrouped if it has ended."""
        for one in list(self._renewed):
            one.renew()

    def weigh_batch(self, weight: float, change: float = 1.0) -> None:
        """Gradients of passes that begin from now on have this weight. ``change``: so much of it is no other batch's,
        but other members': gradients that have been accumulated gain as much."""
        self.weights = Weights(weight, self.weights.changes * change)
        if weight != 1.0:
            for model in list(self.weighed_models):
                model.install_weights()

    def take_newcomers(self) -> None:
        """Tells the daemon that this program can take newcomers. Without its answer nobody joins."""
        try:
            self.daemon.take_newcomers(self.membership.member)
        except ServiceError as error:
            LOG.warning("Nobody can join this job: its daemon did not take note that the program allows it. %s", error)

    def end_first(self, key: object, end: Callable[[], None]) -> None:
        """``end()`` is called before this rank leaves the job in good order. All ranks that it concerns have the same
        in the same order, so that it may wait for them. ``forget_end`` takes it back."""
        self._endings[key] = end

    def forget_end(self, key: object) -> None:
        """The ending that ``end_first`` got under this key is not called any more."""
        self._endings.pop(key, None)

    def end(self) -> None:
        """Calls the endings that ``end_first`` got, in their order. For the moment before ``close``."""
        member, copies = self.membership, self.membership.world_size // self.membership.island_size
        # torch.distributed does not reach beyond an island, so the same program without islands would be right.
        if member.island_size > 1 and copies > 1 and member.rank == 0 and not self.has_wrapped_a_model:
            LOG.warning(
                "No model was wrapped by with_bagua, so each of %d islands has trained a model of its own. [BG618]",
                copies,
            )
        while self._endings and os.getpid() == self.pid:
            # Taken out first: an ending that fails is not called again.
            end = self._endings.pop(next(iter(self._endings)))
            with suppress(CommunicationError):  # the others have ended already, by an error
                end()

    def close_first(self, close: Callable[[], None]) -> None:
        """``close()`` is called just before the connection is closed."""
        self._closings.append(close)

    def fail(self, end: End) -> None:
        """The program comes to this end: the others learn it at once. Newcomers fail alone."""
        if os.getpid() == self.pid and not self.failed and not self.newcomer:
            self.failed = True
            if self.elastic and self.membership.island_size > 1 and not end.lost:
                # torch's collectives may fail before the daemon hears that the mate is lost: it ends this rank then.
                time.sleep(MATE_LOST_S)
            self.connection.fail(end.words, end.lost)

    def close(self, words: str = "") -> None:
        """Leaves the job in good order. ``words``: the exception that the program is handling."""
        if os.getpid() != self.pid:  # a forked child must not close what is its parent's
            return
        self._kept.clear()
        self.progress.close()
        for close in self._closings:
            close()
        self.connection.close(words)


class _Current:
    """The session of the process, None before ``init_process_group`` and after ``destroy_process_group``."""

    session: Session | None = None


CURRENT = _Current()


def current() -> Session:
    """The session of this process. Raises BaguaError before ``init_process_group`` and in a forked child."""
    session = CURRENT.session
    if session is None:
        raise BaguaError(
            "bagua is not initialised in this process: call bagua.torch_api.init_process_group() first. [BG407]"
        )
    if session.pid != os.getpid():
        raise BaguaError(
            f"This process was forked from rank {session.membership.rank}: a forked child can't communicate. Start a "
            "process of its own and call init_process_group() there. [BG407]"
        )
    return session


def is_initialized() -> bool:
    """Returns True between ``init_process_group`` and ``destroy_process_group``."""
    return CURRENT.session is not None


def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """A contiguous tensor of zeros in memory that the daemon sees: primitives on it, or on contiguous parts of it,
    copy nothing.

    Like ``torch.empty``: ``empty(2, 3)`` or ``empty((2, 3))``, dtype float32 by default (``torch.get_default_dtype``).
    ``device``: another one than the CPU gives ``torch.zeros`` there, which is all that primitives need. Raises
    ValueError for negative sizes.
    """
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)  # type: ignore[arg-type]
    if min(shape, default=0) < 0:
        raise ValueError(f"size is {list(shape)}: no dimension can be negative. [BG403]")
    if device is not None and torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return current().memory.empty(shape.numel(), dtype or torch.get_default_dtype()).view(shape)


def report(step: int = 0, total: int = 0, metrics: Mapping[str, float] | None = None, message: str = "") -> None:
    """Tells the daemon how far the training is: ``bagua run`` and ``bagua job show`` display it. Functions that
    ``on_report`` got hear it, too.

    Returns at once; when reports come faster than four a second, only the newest goes to the daemon. Never
    fails the training: without a daemon, in a forked child, or on a newcomer that has not been let in, nothing happens.
    """
    session = CURRENT.session
    if session is not None and session.newcomer:
        return
    if LISTENERS:
        _tell_listeners(session, step, total, metrics or {}, message)
    if session is not None:
        session.progress.report(step, total, metrics or {}, message)


def _tell_listeners(session: Session | None, step: int, total: int, metrics: Mapping[str, float], message: str) -> None:
    try:
        numbers = {name: as_number(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        LOG.warning("This progress report was ignored: %s", error)
        return
    times = {} if session is None else figures(session.statistics.last_step())
    rank = environment.get_rank() if session is None else session.membership.rank
    notify(Report(step, total, numbers, message, times), rank)
