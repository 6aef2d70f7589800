"""The coordinator's records: immutable values without behaviour.

Times named ``..._at`` are for people, seconds since the epoch; times named ``..._clock`` are readings of the service
clock (``clock``), and decisions depend on these alone. 0 means "not yet" in both. Numbers of the enumerations are those
of the protocol.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property


class JobState(enum.IntEnum):
    """Stage of a job's life."""

    PENDING = 1
    STARTING = 2
    RUNNING = 3
    STOPPING = 4
    SUCCEEDED = 5
    FAILED = 6
    CANCELLED = 7
    WAITING = 8  # of an elastic job: paused, or below its minimum of nodes

    @property
    def terminal(self) -> bool:
        """True if nothing follows this state."""
        return JobState.SUCCEEDED <= self <= JobState.CANCELLED

    @property
    def under_way(self) -> bool:
        """True once all ranks were started, until the end is decided."""
        return self is JobState.RUNNING or self is JobState.WAITING


class RankState(enum.IntEnum):
    """State of a rank, as its node reports it."""

    WAITING = 1
    RUNNING = 2
    EXITED = 3


class Phase(enum.IntEnum):
    """State of a node's part of a job, as it reports it. UNKNOWN: no report has come yet."""

    UNKNOWN = 0
    PREPARING = 1
    STARTED = 2
    STOPPED = 3


class Plan(enum.IntEnum):
    """Way in which ranks come into a generation."""

    AT_ONCE = 0
    PLANNED = 1  # after the same training step everywhere
    HOLD = 2  # they don't: after that step they wait for the next one
    STANDSTILL = 3  # the same after a loss: they wait wherever they are, and a step may have to be repeated

    @property
    def holds(self) -> bool:
        """True if the ranks wait in this generation."""
        return self in (Plan.HOLD, Plan.STANDSTILL)


@dataclass(frozen=True)
class JobSpec:
    """The part of a submitted spec that decisions need, and the whole as it came over the wire."""

    name: str
    nnodes: int  # nodes that the job begins on, at most
    nproc_per_node: int  # ranks, and slots, on each of them
    placement_timeout_s: float  # after so long a wait for nodes the job fails; 0: at once
    stop_grace_s: float  # from SIGTERM to SIGKILL for its ranks
    master_port: int  # 0: the coordinator picks one
    wire: bytes  # serialized bagua.v1.JobSpec
    elastic: bool = False  # it goes on without ranks and nodes that are lost
    min_nodes: int = 0  # 0: it begins on all of its nodes, and goes on down to one rank
    max_nodes: int = 0  # 0: nnodes
    respawn: int = 0  # so many ranks an hour are replaced on each node
    island_size: int = 1  # so many ranks are lost together, and come together
    code: str = ""  # digest of the archive that the ranks run in; empty: none

    @property
    def most_nodes(self) -> int:
        """Number of nodes up to which the job grows."""
        return self.max_nodes or self.nnodes

    @property
    def least_nodes(self) -> int:
        """Number of nodes on which the job begins."""
        return self.min_nodes or self.nnodes


@dataclass(frozen=True)
class RankRecord:
    """Rank of the current generation, or the last state of one that is gone."""

    rank: int  # in its generation, over all hosts
    local_rank: int  # among the ranks of its host
    node_id: str
    state: RankState = RankState.WAITING
    pid: int = 0  # on its node; 0: it was not started yet
    exit_code: int = 0
    signal: int = 0  # that killed it; 0: none
    error_tail: str = ""  # last lines of its output, if it failed
    log_path: str = ""  # on its node
    exited_at: float = 0.0  # by the node's wall clock
    seen_exited_clock: float = 0.0  # when the coordinator heard of its end
    follows: bool = False  # it ended after the job had failed on its node
    member: int = -1  # -1: the same number as rank, as in every job that has lost nobody
    left: bool = False  # it has taken leave of its engine, and ends by itself
    newcomer: bool = False  # it came later, and has no state of the job yet
    ready: bool = False  # of a newcomer: it waits for entry
    reason: str = ""  # why it ended before its time

    @property
    def number(self) -> int:
        """Number of the process in its job. It is given once, while ranks are counted anew in each generation."""
        return self.rank if self.member < 0 else self.member

    def moved(self, rank: int, local_rank: int) -> RankRecord:
        """The same process with another rank. A generation of thousands is counted anew while they wait:
        ``dataclasses.replace`` would take four times as long."""
        number = self.number
        if (rank, local_rank, number) == (self.rank, self.local_rank, self.member):
            return self
        made = object.__new__(RankRecord)
        made.__dict__.update(self.__dict__, rank=rank, local_rank=local_rank, member=number)
        return made

    @property
    def failed(self) -> bool:
        """True if the rank ended and did not end well."""
        return self.state is RankState.EXITED and (self.exit_code != 0 or self.signal != 0)


@dataclass(frozen=True)
class HostRecord:
    """Part of one node in the current generation of a job; or, with a negative index, a part that is out of it or not
    yet in it.
    """

    index: int  # place in the ring of hosts, from 0
    node_id: str
    hostname: str
    address: str  # host part of the data plane
    boot_id: str  # the run of the daemon that got the job
    first_rank: int  # its ranks are first_rank to first_rank + nranks - 1
    nranks: int  # also the slots that it takes
    phase: Phase = Phase.UNKNOWN
    engine_address: str = ""  # host:port of the data plane; empty: the engine does not listen yet
    error: str = ""  # the first error that the node reported
    error_clock: float = 0.0  # when it was reported
    waiting: str = ""  # which ranks wait here and for whom, for people
    suspended: str = ""  # why its engine has suspended this generation of an elastic job
    suspended_clock: float = 0.0  # when it said so
    lost_hosts: tuple[str, ...] = ()  # nodes of the hosts that its engine has lost
    accused: tuple[str, ...] = ()  # nodes with which it could not talk itself
    withdrawn: bool = False  # the node ended its part though nothing had failed: see ``error``
    last_generation: int = 0  # that this part was in; 0: it is in the current one, or was in none
    entered: int = 0  # the generation that its engine is in: an older one while a planned change waits for its step
    takes_newcomers: bool = False  # the program has said so here
    joining: bool = False  # newcomers that prepare to join
    dismissed: bool = False  # out by a planned change: its ranks go on until then, and end by themselves
    # joining: when it was started, or got ready; dismissed: when all others had gone on (0: not yet)
    since_clock: float = 0.0
    ranks: tuple[RankRecord, ...] = ()

    @cached_property
    def started(self) -> bool:
        """True if every rank was started."""
        return all(rank.state is not RankState.WAITING for rank in self.ranks)

    @cached_property
    def exited(self) -> bool:
        """True if every rank is over."""
        return all(rank.state is RankState.EXITED for rank in self.ranks)

    @cached_property
    def failed(self) -> tuple[RankRecord, ...]:
        """Ranks that did not end well."""
        return tuple(rank for rank in self.ranks if rank.failed)

    @cached_property
    def losses(self) -> tuple[RankRecord, ...]:
        """Ranks that an elastic job goes on without: those that failed, and newcomers that have ended in any way. An
        exception of others ends the job: see ``causes``."""
        over = (rank for rank in self.ranks if rank.state is RankState.EXITED)
        return tuple(rank for rank in over if rank.failed or rank.newcomer)

    @cached_property
    def ending(self) -> bool:
        """True if the program comes to its end: some rank has left, or has ended well."""
        return any(rank.left or (rank.state is RankState.EXITED and not rank.failed) for rank in self.ranks)

    @cached_property
    def has_newcomers(self) -> bool:
        """True if some rank has no state of the job."""
        return any(rank.newcomer for rank in self.ranks)

    @cached_property
    def new(self) -> bool:
        """True if nobody here has state of the job."""
        return all(rank.newcomer for rank in self.ranks)

    @cached_property
    def ready(self) -> bool:
        """True if all newcomers here wait for entry."""
        return all(rank.ready and rank.state is RankState.RUNNING for rank in self.ranks)

    @property
    def error_text(self) -> str:
        """The error with the name of its node."""
        if f"node {self.node_id}" in self.error:
            return self.error
        return f"node {self.name}: {self.error}"

    @property
    def name(self) -> str:
        """Node id, with the host's name where that says more."""
        return self.node_id if self.hostname in ("", self.node_id) else f"{self.node_id} ({self.hostname})"


@dataclass(frozen=True)
class JobRecord:
    """A job as asked for, decided and seen. ``hosts`` are in order of index, their ranks in order; ``former`` are parts
    that are out, ``joining`` parts that are in no generation yet, both with indices -1, -2, ..."""

    job_id: str
    spec: JobSpec
    created_at: float
    state: JobState = JobState.PENDING
    reason: str = ""  # of the state, for people
    outcome: JobState | None = None  # the terminal state that a STOPPING job goes to
    cancel_reason: str | None = None  # not None: somebody asked to cancel
    generation: int = 0  # goes up with every change of members; 0: not placed yet
    started_at: float = 0.0  # when all ranks were started
    finished_at: float = 0.0
    submitted_clock: float = 0.0
    placed_clock: float = 0.0  # when the current generation was decided
    stopping_clock: float = 0.0  # when its stop was decided
    stalls: int = 0  # how often, in a row, a generation was suspended without a step though nobody was lost
    passes: int = 0  # backward passes that some rank had begun, as far as is known
    stalled_passes: int = 0  # one more than ``passes`` was when the first of the stalls was seen
    # Pairs of nodes that could not talk in these generations; of one with itself: its daemon was started again.
    accusations: tuple[tuple[str, str], ...] = ()
    put_out: tuple[tuple[str, str, float], ...] = ()  # (node, run of its daemon, until when)
    master_addr: str = ""  # MASTER_ADDR of its ranks: the first host
    master_port: int = 0  # MASTER_PORT of its ranks
    job_key: bytes = field(default=b"", repr=False)  # by which its daemons authenticate data connections
    hosts: tuple[HostRecord, ...] = ()
    former: tuple[HostRecord, ...] = ()
    joining: tuple[HostRecord, ...] = ()
    plan: Plan = Plan.AT_ONCE  # of the current generation
    wanted_nodes: int = 0  # the number to which somebody has scaled the job; 0: as many as it may have
    paused: bool = False  # by a request
    next_member: int = 0  # number of the next newcomer
    # The longest time that a node of an elastic job has told (LocalJob of the protocol). A daemon that can't reach a
    # coordinator ends its ranks so much later than those of other jobs. It never gets less.
    patience_s: float = 0.0
    failures: int = 0  # waves of newcomers, in a row, of which one failed
    retry_clock: float = 0.0  # nobody is started to join before
    respawns: tuple[tuple[str, float], ...] = ()  # (node, when) of replacements that were begun within an hour
    namespace: str = "default"
    submitted_by: str = ""  # name of the account
    unix_user: str = ""  # the ranks' user, where daemons run them as their submitter; empty: none
    # By node. Shared with the records that follow this one, so it is checked at each use.
    _indices: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def ranks(self) -> tuple[RankRecord, ...]:
        """Ranks of the current generation, in order."""
        return tuple(rank for host in self.hosts for rank in host.ranks)

    @property
    def parts(self) -> tuple[HostRecord, ...]:
        """Parts that may be on nodes: hosts and former ones."""
        return (*self.hosts, *self.former, *self.joining) if self.former or self.joining else self.hosts

    @property
    def wanted(self) -> int:
        """Number of nodes up to which the job grows now."""
        return self.wanted_nodes or self.spec.most_nodes

    @property
    def least(self) -> int:
        """Number of nodes below which the job waits."""
        return max(1, self.spec.min_nodes)

    @property
    def homes(self) -> dict[int, str]:
        """Member number -> its node, also of those that are gone."""
        return {rank.number: rank.node_id for host in self.parts for rank in host.ranks}

    def other_parts(self, node_id: str) -> list[HostRecord]:
        """Newcomers on this node that are in no generation yet, and anything of a part that is out that may be left."""
        parts = (*self.joining, *self.former)
        return [part for part in parts if part.node_id == node_id and (part.joining or part.phase is not Phase.STOPPED)]

    def host_index(self, node_id: str) -> int | None:
        """The index of the host on this node. None: the node is not in the job."""
        index = self._indices.get(node_id)
        if index is None or index >= len(self.hosts) or self.hosts[index].node_id != node_id:
            self._indices.clear()
            self._indices.update((host.node_id, host.index) for host in self.hosts)
            index = self._indices.get(node_id)
        return index

    @property
    def waiting(self) -> str:
        """The ranks that wait and those that they wait for, over all hosts; empty when nobody waits."""
        if self.state.terminal:
            return ""
        if self.state is JobState.STOPPING:
            busy = [host.node_id for host in self.parts if host.phase is not Phase.STOPPED]
            return (
                f"{len(busy)} of {len(self.parts)} nodes have not stopped it yet: {', '.join(busy[:10])}"
                if busy
                else ""
            )
        return "; ".join(host.waiting for host in self.hosts if host.waiting)


@dataclass(frozen=True)
class Stored:
    """A job as the database has it. ``revision`` goes up with every change; ``owner`` is the coordinator that
    decides."""

    job: JobRecord
    revision: int
    last_event: int  # seq of the newest event
    owner: str | None


@dataclass(frozen=True)
class Change:
    """A step of a job, to be written if nobody else has changed the job since ``old`` was read."""

    old: Stored
    job: JobRecord
    events: tuple[Event, ...]
    owner: str | None

    @property
    def stored(self) -> Stored:
        """The job once the step is written."""
        return Stored(self.job, self.old.revision + 1, self.old.last_event + len(self.events), self.owner)

    @property
    def placed(self) -> tuple[HostRecord, ...]:
        """Parts for which the step takes slots."""
        if not self.old.job.hosts:
            return self.job.hosts
        before = {part.index for part in self.old.job.joining}
        return tuple(part for part in self.job.joining if part.index not in before and part.phase is Phase.UNKNOWN)

    def takes(self, node_id: str, boot_id: str) -> int:
        """Slots that the step takes of a node while this run of its daemon lives, less those that it gives back."""

        def held(job: JobRecord) -> int:
            there = (part for part in job.parts if (part.node_id, part.boot_id) == (node_id, boot_id))
            return sum(part.nranks for part in there if part.phase is not Phase.STOPPED)

        return held(self.job) - held(self.old.job)


def reshaped(old: JobRecord, new: JobRecord) -> bool:
    """True if ``new`` has other parts than ``old``: a generation has begun, newcomers were started or given up."""
    if new.generation != old.generation:
        return True
    if new.former is old.former and new.joining is old.joining:
        return False
    before = [part.index for part in (*old.former, *old.joining)]
    return before != [part.index for part in (*new.former, *new.joining)] or len(old.former) != len(new.former)


@dataclass(frozen=True)
class NodeRecord:
    """A node daemon. ``owner`` is the coordinator that holds its session, None: no session."""

    node_id: str
    hostname: str
    address: str
    slots: int  # ranks that may run there at once
    version: str  # of its daemon
    boot_id: str  # of the run of its daemon
    last_seen: float  # for people: when its session began, or ended
    owner: str | None = None
    draining: bool = False  # somebody has asked that nothing begins there and elastic jobs leave it
    leaving: bool = False  # the same, as its daemon says, which will end
    wire_version: int = 0  # of all that its daemon and ranks say to those of others; 0: unknown


@dataclass(frozen=True)
class CoordinatorRecord:
    """A coordinator, as the database knows it."""

    owner: str
    clock: float = 0.0  # its service clock at its last beat
    address: str = ""  # host:port for others; empty: not known
    machine: str = ""  # where an address of the loopback means this one
    arrived_clock: float = 0.0  # since when others can know of it; 0: from the beginning


@dataclass(frozen=True)
class NodeView:
    """A node as a decision sees it."""

    node_id: str
    hostname: str
    address: str
    boot_id: str
    slots: int
    used: int  # slots taken by jobs that are not yet stopped on it
    connected: bool
    heard_clock: float  # when it was heard of last; 0: another coordinator holds its session, and knows
    hung_up: bool = False  # its session was seen to end: it is not only that no coordinator has met it yet
    last_seen: float = 0.0  # for people
    version: str = ""
    asked_to_drain: bool = False  # by a user
    leaving: bool = False  # its daemon will end, as it says
    closed: bool = False  # it gets nothing new in this round
    wire_version: int = 0

    @property
    def free(self) -> int:
        """Slots that a job may take now."""
        return max(0, self.slots - self.used)

    @property
    def draining(self) -> bool:
        """True if nothing begins there, and elastic jobs leave it."""
        return self.asked_to_drain or self.leaving

    @property
    def open(self) -> bool:
        """True if jobs may begin there now."""
        return self.connected and not self.draining and not self.closed

    def host(self, index: int, ranks: Sequence[RankRecord]) -> HostRecord:
        """A new part of a job on this node, for this run of its daemon."""
        first, count = ranks[0].rank, len(ranks)
        return HostRecord(
            index, self.node_id, self.hostname, self.address, self.boot_id, first, count, ranks=tuple(ranks)
        )

    def marked(self, draining: bool | None, leaving: bool | None) -> NodeView:
        """The same, draining or not: as a user has asked, as its daemon says (None: as it was)."""
        asked = self.asked_to_drain if draining is None else draining
        return replace(self, asked_to_drain=asked, leaving=self.leaving if leaving is None else leaving)


@dataclass(frozen=True)
class LocalRank:
    """A node's report on one rank. Fields are those of RankRecord, as the node has them."""

    rank: int
    state: RankState
    pid: int = 0
    exit_code: int = 0
    signal: int = 0
    error_tail: str = ""
    log_path: str = ""
    exited_at: float = 0.0
    follows: bool = False
    member: int = 0
    left: bool = False
    newcomer: bool = False
    ready_to_join: bool = False
    reason: str = ""


@dataclass(frozen=True)
class LocalJob:
    """Report of a node about one job. Fields are those of HostRecord, as the node has them."""

    job_id: str
    generation: int
    phase: Phase
    engine_address: str = ""
    error: str = ""
    waiting: str = ""
    ranks: tuple[LocalRank, ...] = ()
    suspended: str = ""
    suspended_hosts: tuple[int, ...] = ()  # hosts that its engine has lost, by index in the generation reported
    suspended_nodes: tuple[str, ...] = ()  # the same by node
    accused: tuple[str, ...] = ()  # nodes with which it could not talk itself
    passes: int = 0  # backward passes that a rank there had begun
    withdrawn: bool = False
    takes_newcomers: bool = False
    entered: int = 0
    patience_s: float = 0.0  # see JobRecord


@dataclass(frozen=True)
class Event:
    """Something that happened to a job, with its reason. ``seq`` counts from 1 within the job; 0: not stored yet."""

    kind: str
    reason: str
    generation: int
    time: float
    seq: int = 0
