"""An elastic job as the coordinator decides about it, with nodes that say whatever a test lets them say."""

from dataclasses import replace

from bagua.daemon.coordinator.rules.decide import apply, decide
from bagua.daemon.coordinator.rules.domain import (
    JobRecord,
    JobSpec,
    JobState,
    LocalJob,
    LocalRank,
    NodeView,
    Phase,
    RankState,
)
from bagua.daemon.coordinator.rules.observe import observe
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.streams.directives import Order, concerns, wish
from bagua.proto import common_pb2, node_pb2

OPTIONS = Options(lease_s=10, settle_s=1, regroup_s=0.2, stall_s=60, max_stalls=3, join_s=100, rejoin_s=60)
WALL = 1e9
WIRE = common_pb2.JobSpec(elastic=True).SerializeToString()


class Cluster:
    """A job of two ranks on each node, or ``per_node``, on nodes a, b, ...; what its nodes say, and what is decided."""

    def __init__(self, nodes="ab", least=0, most=4, respawn=0, takes=True, per_node=2, island_size=1):
        self.per_node = per_node
        self.now = 100.0
        self.told = []
        self.views = {}
        self.there(*nodes)
        options = {"min_nodes": least, "max_nodes": most, "respawn": respawn, "island_size": island_size}
        spec = JobSpec("job", len(nodes), per_node, 30, 5.0, 0, WIRE, elastic=True, **options)
        self.takes = takes
        self.job = JobRecord("job-1", spec, WALL, submitted_clock=100.0)
        self.decide()
        for name in nodes:
            self.says(name)
        self.decide()
        assert self.job.state is JobState.RUNNING

    def there(self, *names, **more):
        for name in names:
            view = NodeView(name, "", "::1", f"boot {name}", self.per_node, 0, True, 0.0)
            self.views[name] = replace(view, **more)

    def decide(self, at=0.0):
        """All steps that are possible now."""
        self.now += at
        used = {}
        for _ in range(10):
            used = dict.fromkeys(self.views, 0)
            for part in self.job.parts:
                used[part.node_id] += part.nranks * (part.phase is not Phase.STOPPED)
            self.views = {name: replace(view, used=used[name]) for name, view in self.views.items()}
            before = self.job
            self.job, _ = apply(before, decide(before, self.views, self.now, OPTIONS), self.now, WALL)
            if self.job == before:
                return self.job
        raise AssertionError("it never comes to rest")

    def wake(self):
        return decide(self.job, self.views, self.now, OPTIONS).wake_at

    def says(self, name, *special, entered=-1, boot="", **more):
        """All ranks of the node run, but for those in ``special``."""
        told = {rank.member: rank for rank in special}
        mine = [host for host in self.job.hosts if host.node_id == name]
        parts = [*mine, *self.job.other_parts(name)]
        ranks = [
            told.get(
                rank.number,
                LocalRank(
                    rank.rank,
                    RankState.RUNNING,
                    1,
                    member=rank.number,
                    newcomer=rank.newcomer,
                    ready_to_join=rank.ready,
                )
                if rank.state is not RankState.EXITED
                else LocalRank(rank.rank, RankState.EXITED, member=rank.number),
            )
            for part in parts
            for rank in part.ranks
        ]
        entered = (self.job.generation if mine and not self.job.plan.holds else 0) if entered < 0 else entered
        fact = LocalJob(
            "job-1",
            self.job.generation,
            Phase.STARTED,
            f"::1:{name}",
            ranks=tuple(ranks),
            takes_newcomers=self.takes,
            entered=entered,
        )
        self.job, told = observe(self.job, name, boot or f"boot {name}", replace(fact, **more), self.now, WALL)
        self.told += [event.reason for event in told]
        return self.job

    def ready(self, *names):
        """All newcomers there wait for entry."""
        for name in names:
            parts = [part for part in self.job.joining if part.node_id == name]
            present = [host.entered for host in self.job.hosts if host.node_id == name]
            self.says(
                name, *(waits(rank.number) for part in parts for rank in part.ranks), entered=max(present, default=0)
            )
        return self.decide()

    def enter(self, names="", newcomers=False):
        """These nodes, or all, are in the generation; newcomers have their state then, if not otherwise said."""
        for host in self.job.hosts:
            if not names or host.node_id in names:
                ranks = [
                    LocalRank(rank.rank, RankState.RUNNING, 1, member=rank.number, newcomer=newcomers)
                    for rank in host.ranks
                    if rank.state is RankState.RUNNING
                ]
                self.says(host.node_id, *ranks)
        return self.decide()

    def asks(self, change, *arguments):
        self.job, _ = change(self.job, *arguments)
        return self.decide()

    def members(self):
        assert [rank.rank for rank in self.job.ranks] == list(range(len(self.job.ranks)))
        assert [host.index for host in self.job.hosts] == list(range(len(self.job.hosts)))
        indices = [part.index for part in self.job.parts]
        assert len(set(indices)) == len(indices)
        assert {part.index < 0 for part in (*self.job.former, *self.job.joining)} <= {True}
        return [(host.node_id, [rank.number for rank in host.ranks]) for host in self.job.hosts]

    def joining(self):
        return [(part.node_id, [rank.number for rank in part.ranks]) for part in self.job.joining]

    def run(self, name):
        """The newest RunJob for a node."""
        wanted = wish(self.job)
        assert wanted is not None
        order = Order(wanted, self.job)
        (host,) = [
            part for part in self.job.parts if part.node_id == name and concerns(wanted, part) and order.counts(part)
        ]
        directive = node_pb2.Directive.FromString(order.to(host))
        assert directive.WhichOneof("directive") == "run"
        return directive.run


def waits(member):
    return LocalRank(0, RankState.RUNNING, 1, member=member, newcomer=True, ready_to_join=True)


def over(member, **more):
    return LocalRank(member, RankState.EXITED, 1, member=member, **more)


def killed(member, at=0.0):
    return over(member, exit_code=-9, signal=9, exited_at=at)
