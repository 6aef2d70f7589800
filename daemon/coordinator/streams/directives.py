"""Makes the directives for the nodes of a job, and their form on the wire. A node that is out
gets a StopJob, whatever the others do; one that leaves by a planned change goes on until then.

Levels, not edges: telling again changes nothing. What all nodes of a job get is encoded once, and each adds its index:
protobuf messages that are concatenated are one message.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cached_property

from bagua.daemon.coordinator.rules.domain import HostRecord, JobRecord, JobState, Phase, Plan
from bagua.proto import common_pb2, node_pb2


@dataclass(frozen=True)
class Run:
    """Run this generation. ``engine_addresses`` in ring order once all are known, before that empty."""

    job_id: str
    generation: int
    engine_addresses: tuple[str, ...] = ()
    plan: Plan = Plan.AT_ONCE
    joining: tuple[tuple[int, ...], ...] = ()  # members of each part that prepares to join
    dismissed: tuple[str, ...] = ()  # nodes that leave after the same step as the others
    ending: tuple[str, ...] = ()  # nodes on which former newcomers end before the next ones begin
    waiting: str = ""  # why the job waits
    patience_s: float = 0.0  # see RunJob


def wish(job: JobRecord) -> Run | node_pb2.StopJob | None:
    """The directive for every host of the job, but for those that have stopped."""
    if job.state is JobState.STARTING or job.state.under_way:
        known = tuple(host.engine_address for host in job.hosts)
        return Run(
            job.job_id,
            job.generation,
            known if len(known) > 1 and all(known) else (),
            job.plan,
            tuple(tuple(rank.number for rank in part.ranks) for part in job.joining),
            tuple(part.node_id for part in job.former if part.dismissed and part.phase is not Phase.STOPPED),
            _ending(job),
            job.reason if job.state is JobState.WAITING else "",
            job.patience_s,
        )
    if job.state is JobState.PENDING:
        return None
    return node_pb2.StopJob(
        job_id=job.job_id, generation=job.generation, reason=job.reason, grace_s=job.spec.stop_grace_s
    )


def _ending(job: JobRecord) -> tuple[str, ...]:
    left = {part.node_id for part in job.former if not part.dismissed and part.phase is not Phase.STOPPED}
    return tuple(part.node_id for part in job.joining if part.node_id in left)


def concerns(wanted: Run | node_pb2.StopJob, host: HostRecord) -> bool:
    """True if the host has something to do."""
    return (isinstance(wanted, Run) and host.index >= 0) or host.phase is not Phase.STOPPED


class Order:
    """A wish about a job, ready to be sent to its hosts."""

    def __init__(self, wish: Run | node_pb2.StopJob, job: JobRecord) -> None:
        self.wish = wish
        self._job = job

    def counts(self, part: HostRecord) -> bool:
        """True if the node is told of this part. Of all parts on a node one is told: that of the generation, or else
        one that leaves it by a planned change, or else one that is to end, or else one that prepares to join. Of an end
        all are.
        """
        if part.index >= 0 or not isinstance(self.wish, Run):
            return True
        if part.node_id in self._hosts or part.node_id in self.wish.dismissed:
            return part.node_id not in self._hosts and part.dismissed
        return not part.joining or part.node_id not in self.wish.ending

    @cached_property
    def _hosts(self) -> frozenset[str]:
        return frozenset(host.node_id for host in self._job.hosts)

    def to(self, host: HostRecord, packs: bool = False) -> bytes:
        """A serialized Directive for the node of this part. ``packs``: its daemon takes large ones compressed."""
        if isinstance(self.wish, node_pb2.StopJob):
            return self._shared
        if host.index < 0 and not host.joining and not host.dismissed:
            return self._leave
        own = node_pb2.RunJob(host_index=host.index if host.index >= 0 else NOWHERE)
        if host.dismissed:
            shared = self._dismissal
        else:
            shared = self._packed if packs else self._shared
        body = shared + own.SerializeToString()
        return _RUN_TAG + _varint(len(body)) + body  # a field of a message: its tag, its length, its bytes

    @cached_property
    def _shared(self) -> bytes:
        if isinstance(self.wish, node_pb2.StopJob):
            return node_pb2.Directive(stop=self.wish).SerializeToString()
        return _run_message(self.wish, self._job).SerializeToString()

    @cached_property
    def _packed(self) -> bytes:
        if len(self._shared) < _LARGE:
            return self._shared
        whole = node_pb2.RunJob.FromString(self._shared)
        for host in whole.hosts:
            if host.members == host.ranks:
                host.ClearField("members")
            host.nranks = len(host.ranks)
            host.ClearField("ranks")  # they follow from the numbers of ranks
            host.ClearField("address")
        return node_pb2.RunJob(packed=zlib.compress(whole.SerializeToString(), _LEVEL)).SerializeToString()

    @cached_property
    def _dismissal(self) -> bytes:
        """Directive by which ranks leave after their step, also if others wait then, or have begun another generation
        since.
        """
        assert isinstance(self.wish, Run)
        return _run_message(replace(self.wish, plan=Plan.PLANNED), self._job).SerializeToString()

    @cached_property
    def _leave(self) -> bytes:
        stop = node_pb2.StopJob(
            job_id=self._job.job_id,
            generation=self._job.generation,
            reason=f"the job goes on without this node since generation {self._job.generation}",
            grace_s=self._job.spec.stop_grace_s,
            others_go_on=True,
        )
        return node_pb2.Directive(stop=stop).SerializeToString()


_LARGE = 4_096
_LEVEL = 1  # more costs twenty times as much, for nothing
NOWHERE = 0xFFFFFFFF  # host_index of a node that is in no host
_RUN_TAG = bytes([node_pb2.Directive.RUN_FIELD_NUMBER << 3 | 2])  # 2: a field with a length


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _run_message(run: Run, job: JobRecord) -> node_pb2.RunJob:
    """Makes the message, all but ``host_index``."""
    hosts = [
        node_pb2.HostPlan(
            node_id=host.node_id,
            address=host.address,
            ranks=range(host.first_rank, host.first_rank + host.nranks),
            engine_address=run.engine_addresses[host.index] if run.engine_addresses else "",
            members=[rank.number for rank in host.ranks] if job.spec.elastic else (),
            newcomers=[rank.number for rank in host.ranks if rank.newcomer],
        )
        for host in job.hosts
    ]
    joining = [
        node_pb2.HostPlan(
            node_id=part.node_id,
            address=part.address,
            ranks=range(part.nranks),
            members=[rank.number for rank in part.ranks],
        )
        for part in job.joining
    ]
    return node_pb2.RunJob(
        job_id=job.job_id,
        generation=job.generation,
        spec=common_pb2.JobSpec.FromString(job.spec.wire),
        hosts=hosts,
        job_key=job.job_key,
        master_addr=job.master_addr,
        master_port=job.master_port,
        planned=run.plan is not Plan.AT_ONCE,
        joining=joining,
        hold=run.plan.holds,
        waiting=run.waiting,
        unix_user=job.unix_user,
        patience_s=run.patience_s,
    )
