"""Computes one round: takes facts and wishes, returns changes. It knows no clock and no database.

A Stage lies over the board: it sees what this round has changed already, and the board learns of it only after it was
written. If writing fails, the stage is thrown away and nothing was lost but the thinking.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from bagua.base.errors import NotFoundError
from bagua.daemon.coordinator.rounds.live_state import NOTHING_KEPT, Board, Kept, Shape, kept_words
from bagua.daemon.coordinator.rounds.requests import Wished
from bagua.daemon.coordinator.rules.decide import Decision, apply, decide
from bagua.daemon.coordinator.rules.domain import (
    Change,
    Event,
    HostRecord,
    JobRecord,
    JobState,
    LocalJob,
    NodeView,
    Phase,
    Stored,
    reshaped,
)
from bagua.daemon.coordinator.rules.evidence import accusers, host_loss
from bagua.daemon.coordinator.rules.observe import Changed, forget, observe
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.placement import keep

FAULT_RETRY_S = 30.0
"""After so long a job that can't be stopped for a fault of the coordinator is tried again."""


@dataclass(frozen=True)
class Fault:
    """A step about one job that raised: a fault of the coordinator. ``content`` is the fact that was taken in."""

    job_id: str
    step: str
    error: Exception
    content: object = None


@dataclass(eq=False)
class Stage:
    """``now`` by the service clock, ``wall`` for people; ``mine`` tells whether this coordinator decides about a job;
    ``closed`` are nodes that get no new jobs in this round; ``heard`` tells when a node that is connected was heard of
    last."""

    board: Board
    options: Options
    now: float
    wall: float
    mine: Callable[[Stored], bool]
    closed: frozenset[str] = frozenset()
    heard: Callable[[str], float | None] = lambda node_id: None

    def __post_init__(self) -> None:
        self._views = dict(self.board.views)
        for node_id in self.closed & self._views.keys():
            self._views[node_id] = replace(self._views[node_id], closed=True)
        self._kept: Kept | None = None  # None: not known yet in this round
        self.left = False  # the job that nodes were kept for waits no longer: those that come after it may fit
        self._jobs: dict[str, JobRecord] = {}
        self._events: dict[str, list[Event]] = {}
        self._owners: dict[str, str] = {}
        self.wakes: dict[str, float] = {}  # job id -> when to look again, by the service clock
        self.decisions = 0
        self.freed = False  # slots became free: jobs that wait may fit
        self.silent: dict[str, str] = {}  # nodes with a session here, lost by jobs of other coordinators; why
        self.faults: list[Fault] = []

    def job(self, job_id: str) -> JobRecord | None:
        """Returns a job as this round sees it."""
        return self._jobs.get(job_id) or self.board.job(job_id)

    def changes(self) -> list[Change]:
        """Returns the changes to be written."""
        found = []
        for job_id in dict.fromkeys((*self._jobs, *self._owners)):
            old = self.board.jobs[job_id]
            owner = self._owners.get(job_id, old.owner)
            found.append(Change(old, self._jobs.get(job_id, old.job), tuple(self._events.get(job_id, ())), owner))
        return found

    # ---- what came

    def claim(self, job_id: str, owner: str) -> None:
        """``owner`` decides about the job from now on."""
        self._owners[job_id] = owner

    def wish(self, job_id: str, wish: Callable[[JobRecord], Wished]) -> None:
        """Changes a job as somebody asks. Raises what ``wish`` raises, and NotFoundError for a job that has ended."""
        job = self.job(job_id)
        if job is None or job.state.terminal:
            raise NotFoundError(f"There is no job {job_id[:64]!r} that has not ended. [BG810]")
        new, text = wish(job)
        if new != job:
            event = Event(
                "cancel_requested" if new.cancel_reason != job.cancel_reason else "asked",
                text,
                new.generation,
                self.wall,
            )
            self._update(job_id, new, [event])

    def mark(self, node_id: str, draining: bool | None, leaving: bool | None) -> None:
        """The node drains, or not: as a user has asked, as its daemon says (None: as it was)."""
        if node_id in self._views:
            self._views[node_id] = self._views[node_id].marked(draining, leaving)

    def fail(self, job_id: str, reason: str) -> None:
        """Ends a job because the coordinator can't go on with it. One that stops already, or can't even be ended, is
        tried again later. Raises nothing but MemoryError."""
        try:
            self._fail(job_id, reason)
        except MemoryError:
            raise
        except Exception as error:
            self.faults.append(Fault(job_id, "fail", error))
            self.wakes[job_id] = self.now + FAULT_RETRY_S

    def _fail(self, job_id: str, reason: str) -> None:
        job = self.job(job_id)
        if job is None or job.state.terminal:
            return
        if job.state is JobState.STOPPING:
            self.wakes[job_id] = self.now + FAULT_RETRY_S
        elif job.state is JobState.PENDING:
            self._step(job, Decision(JobState.FAILED, reason))
        else:
            self._step(job, Decision(JobState.STOPPING, reason, JobState.FAILED))

    def observe(self, node_id: str, boot_id: str, fact: LocalJob) -> bool:
        """Takes in what a node says of a job. False if the node should stop what it runs: nobody knows it, or the node
        is not in it (any more), or it had said before that nothing is left."""
        job = self.job(fact.job_id)
        if job is None or not _belongs(job, node_id, fact):
            return False
        with self._alone(job.job_id, "observe", (node_id, fact)):
            self._take(job, node_id, observe(job, node_id, boot_id, fact, self.now, self.wall))
            return True
        if fact.phase is Phase.STOPPED:  # this part of it is certain
            self.forget(node_id, boot_id, fact.job_id)
        return True

    def forget(self, node_id: str, boot_id: str, job_id: str) -> None:
        """Takes in that a node holds nothing of a job that was placed on it."""
        job = self.job(job_id)
        if job is not None:
            with self._alone(job_id, "forget", node_id):
                self._take(job, node_id, forget(job, node_id, boot_id, self.now, self.wall))

    # ---- what follows

    def decide(self, job_id: str) -> None:
        """Steps of one job, as many as are possible now."""
        with self._alone(job_id, "decide"):
            self._decide(job_id)

    def _decide(self, job_id: str) -> None:
        while (job := self.job(job_id)) is not None:
            if job.state.terminal:
                return
            if not (job_id in self._owners or self.mine(self.board.jobs[job_id])):
                self._listen(job)
                return
            decision = decide(job, self._seen(job), self.now, self.options)
            if decision.wake_at is not None:
                self.wakes[job_id] = decision.wake_at
            if decision.state is None and job.state is JobState.PENDING and self._keep()[0] not in ("", job_id):
                decision = replace(decision, reason=kept_words(self._keep()[0]))
            if decision.state is None and job.state is JobState.PENDING and job.reason != "submitted":
                return  # why it waits is told from memory: it changes with every slot, for every job that waits
            new = self._step(job, decision)
            if new.state is job.state and not reshaped(job, new) and decision.wave is None:
                return

    def _listen(self, job: JobRecord) -> None:
        """Listens for a job about which another coordinator decides: only this one knows when it has heard of its own
        nodes.
        """
        nodes = self._seen(job)
        accused = accusers(job, nodes, self.options)
        for host in job.hosts:
            accuser = accused.get(host.node_id)
            if accuser is None or host.withdrawn or host.phase is Phase.STOPPED or self.heard(host.node_id) is None:
                continue
            words, at = host_loss(job, host, accuser, nodes, self.now, self.options)
            if words:
                self.silent[host.node_id] = words
            elif at is not None:
                self.wakes[job.job_id] = min(at, self.wakes.get(job.job_id, at))

    def _step(self, job: JobRecord, decision: Decision) -> JobRecord:
        new, events = apply(job, decision, self.now, self.wall)
        if new is not job:
            self.decisions += 1
            self._update(job.job_id, new, events)
        return new

    @contextmanager
    def _alone(self, job_id: str, step: str, content: object = None) -> Iterator[None]:
        """Guards what is done for one job. An exception in here is a fault of the coordinator: it ends this job and
        holds up no other.
        """
        try:
            yield
        except MemoryError:  # no fault of this step: the round is tried again
            raise
        except Exception as error:
            self.faults.append(Fault(job_id, step, error, content))
            self.fail(job_id, fault_reason(step, error))

    def place(self, shapes: Iterable[Shape] | None = None) -> None:
        """Places jobs that wait, the oldest first, as long as any fits. ``shapes``: only these (None: all)."""
        holder, kept = self._keep()
        waiting = self.board.waiting.by_shape()
        queues = {
            shape: iter(waiting[shape].items()) for shape in (waiting if shapes is None else shapes) if shape in waiting
        }
        heads = {shape: next(queue) for shape, queue in queues.items()}
        free = self._free(kept)
        while heads:
            shape, (job_id, _) = min(heads.items(), key=lambda item: item[1][1])
            job = self.job(job_id)
            fits = job is not None and job.state is JobState.PENDING
            if fits and job_id != holder and not _fits(shape, free):
                del heads[shape]  # nor do those behind it, which have the same shape
                continue
            if fits:
                self.decide(job_id)
                holder, kept = self._keep()
                free = self._free(kept)
            following = next(queues[shape], None)
            if following is None:
                del heads[shape]
            else:
                heads[shape] = following
        if shapes is None:  # all have been looked at since
            self.left = False

    # ---- helpers

    def _seen(self, job: JobRecord) -> Mapping[str, NodeView]:
        """The nodes; with the time when those were heard of last that others of this job have lost."""
        accused = {name for host in job.hosts if host.lost_hosts for name in host.lost_hosts}
        heard = {name: self.heard(name) for name in accused & self._views.keys()}
        fresh = {name: replace(self._views[name], heard_clock=at) for name, at in heard.items() if at is not None}
        holder, kept = self._keep()
        if job.job_id != holder and (job.state is JobState.PENDING or job.spec.elastic):  # others take nothing new
            fresh |= {name: replace(fresh.get(name, self._views[name]), closed=True) for name in kept}
        return ChainMap(fresh, self._views) if fresh else self._views

    def _keep(self) -> Kept:
        """Nodes for the job that has waited longest of those that could fit; none while it has not waited long."""
        if self._kept is None:
            self._kept = self._newly_kept()
            if self.board.kept[1] - self._kept[1]:
                self.freed = True
        return self._kept

    @property
    def kept(self) -> Kept:
        """The job that nodes are kept for, and these, as far as this round knows."""
        return self.board.kept if self._kept is None else self._kept

    def _newly_kept(self) -> Kept:
        heads = (min(jobs.items(), key=lambda one: one[1]) for jobs in self.board.waiting.by_shape().values())
        for job_id, _ in sorted(heads, key=lambda one: one[1]):
            job = self.job(job_id)
            if job is not None and job.state is JobState.PENDING and (nodes := keep(job.spec, self._views.values())):
                late = self.now >= job.submitted_clock + self.options.keep_after_s
                return (job_id, nodes) if late else NOTHING_KEPT
        return NOTHING_KEPT

    @property
    def has_room(self) -> bool:
        """True if jobs that wait may fit: slots became free, or nodes are kept for nobody any more."""
        if self.board.kept[0]:
            self._keep()
        return self.freed

    def _free(self, kept: frozenset[str]) -> list[list[int]]:
        """Free slots of the nodes that take jobs, but for those that are kept for one, the largest first: those of each
        wire version."""
        free: dict[int, list[int]] = {}
        for name, view in self._views.items():
            if view.open and view.free and name not in kept:
                free.setdefault(view.wire_version, []).append(view.free)
        return [sorted(slots, reverse=True) for slots in free.values()]

    def _take(self, job: JobRecord, node_id: str, changed: Changed) -> None:
        new, events = changed
        if new is not job:
            self._update(job.job_id, new, events, job.host_index(node_id))

    def _update(self, job_id: str, new: JobRecord, events: Iterable[Event], index: int | None = None) -> None:
        """``index``: of the only host that may differ, unless the job is reshaped."""
        old = self.job(job_id)
        assert old is not None
        self._jobs[job_id] = new
        if job_id == self.kept[0] and new.state is not JobState.PENDING:
            self._kept, self.left = None, True
        self._events.setdefault(job_id, []).extend(events)
        if reshaped(old, new):
            for host in old.parts:
                self._use(host, -1)
            for host in new.parts:
                self._use(host, 1)
            self.freed |= bool(old.hosts)  # a rank that is out has left its slot
            return
        if index is None:
            pairs = list(zip(new.parts, old.parts, strict=True))
        else:
            pairs = [(new.hosts[index], old.hosts[index])]
            pairs += zip((*new.former, *new.joining), (*old.former, *old.joining), strict=True)
        for host, before in pairs:
            if host is not before and host.phase is Phase.STOPPED and before.phase is not Phase.STOPPED:
                self._use(before, -1)
                self.freed = True

    def _use(self, host: HostRecord, sign: int) -> None:
        view = self._views.get(host.node_id)
        if view is not None and view.boot_id == host.boot_id and host.phase is not Phase.STOPPED:
            self._views[host.node_id] = replace(view, used=view.used + sign * host.nranks)


def _belongs(job: JobRecord, node_id: str, fact: LocalJob) -> bool:
    """True if the fact speaks of this run of the job. A node that is a generation behind has been told the newest."""
    if fact.generation > job.generation or (fact.generation < job.generation and not job.spec.elastic):
        return False
    index = job.host_index(node_id)
    parts = [*job.other_parts(node_id), *(() if index is None else (job.hosts[index],))]
    return any(part.phase is not Phase.STOPPED or fact.phase is Phase.STOPPED for part in parts)


def fault_reason(step: str, error: Exception) -> str:
    """Why a job ends at which ``step`` raised ``error``."""
    return f"the coordinator failed at this job: {type(error).__name__} in '{step}'; its log tells more"


def _fits(shape: Shape, free: list[list[int]]) -> bool:
    nnodes, nproc = shape
    return any(len(slots) >= nnodes and slots[nnodes - 1] >= nproc for slots in free)  # the largest come first
