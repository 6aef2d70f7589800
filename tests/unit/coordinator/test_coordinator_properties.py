"""A cluster of pure values under random histories: whatever nodes, users and clocks do, the promises hold."""

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bagua.daemon.coordinator.rules.decide import TRANSITIONS, apply, decide
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
from bagua.daemon.coordinator.rules.failure_reasons import silent_since
from bagua.daemon.coordinator.rules.observe import forget, observe
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.streams.directives import Run, wish

OPTIONS = Options(lease_s=10, settle_s=1)
NODES = ("a", "b", "c")
SLOTS = 3
nodes_of = st.sampled_from(NODES)


class Cluster(RuleBasedStateMachine):
    """Jobs on three nodes; what a store would keep is kept in dictionaries."""

    def __init__(self):
        super().__init__()
        self.now = 1_000.0
        self.wall = 0.0  # jumps as it likes
        self.jobs = {}
        self.history = {}
        self.boots = dict.fromkeys(NODES, 1)
        self.connected = dict.fromkeys(NODES, True)
        self.heard = dict.fromkeys(NODES, 1_000.0)

    def views(self):
        return {
            name: NodeView(
                name,
                name,
                "::1",
                str(self.boots[name]),
                SLOTS,
                self.used(name),
                self.connected[name],
                self.heard[name],
                hung_up=not self.connected[name],
            )
            for name in NODES
        }

    def used(self, name):
        return sum(
            host.nranks
            for job in self.jobs.values()
            for host in job.parts
            if host.node_id == name and host.phase is not Phase.STOPPED and host.boot_id == str(self.boots[name])
        )

    def put(self, job):
        self.jobs[job.job_id] = job
        self.history[job.job_id].append(job)

    def hosted(self, name):
        return [job for job in self.jobs.values() if any(host.node_id == name for host in job.parts)]

    # ---- what may happen

    @rule(
        nnodes=st.integers(1, 3),
        nproc=st.integers(1, 3),
        timeout=st.sampled_from([0.0, 5.0, 1e6, 1e6]),
        elastic=st.booleans(),
    )
    def submit(self, nnodes, nproc, timeout, elastic):
        job_id = f"job-{len(self.jobs)}"
        self.history[job_id] = []
        spec = JobSpec("", nnodes, nproc, timeout, 1.0, 0, b"", elastic=elastic)
        self.put(JobRecord(job_id, spec, 0.0, submitted_clock=self.now))

    @precondition(lambda self: self.jobs)
    @rule()
    def look(self):
        for job in list(self.jobs.values()):
            new, events = apply(job, decide(job, self.views(), self.now, OPTIONS), self.now, self.wall)
            assert (new == job) == (not events)
            self.put(new)

    @rule(phase=st.sampled_from([Phase.STARTED, Phase.STOPPED]), state=st.sampled_from(list(RankState)))
    def all_goes_well(self, phase, state):
        """Connected nodes do what they were told."""
        for name in NODES:
            if self.connected[name]:
                self.node_says(name, phase, state, 0, "", "", False, None)
        self.look()

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def cancel(self, data):
        job = self.jobs[data.draw(st.sampled_from(sorted(self.jobs)))]
        if not job.state.terminal and job.state is not JobState.STOPPING:
            self.put(replace(job, cancel_reason="cancelled"))

    @rule(name=nodes_of)
    def connect(self, name):
        self.connected[name], self.heard[name] = True, self.now

    @rule(name=nodes_of)
    def disconnect(self, name):
        if self.connected[name]:
            self.connected[name], self.heard[name] = False, self.now

    @rule(name=nodes_of)
    def restart_daemon(self, name):
        self.boots[name] += 1
        self.connected[name], self.heard[name] = True, self.now
        for job in self.hosted(name):
            self.put(forget(job, name, str(self.boots[name]), self.now, self.wall)[0])

    @rule(seconds=st.floats(0.1, 30))
    def time_passes(self, seconds):
        self.now += seconds

    @rule(seconds=st.floats(-1e9, 1e9))
    def the_wall_clock_is_set(self, seconds):
        self.wall += seconds

    @rule(
        name=nodes_of,
        phase=st.sampled_from(list(Phase)),
        state=st.sampled_from(list(RankState)),
        code=st.sampled_from([0, 0, 1, -9]),
        error=st.sampled_from(["", "", "broken"]),
        tail=st.sampled_from(["", "ValueError: x"]),
        follows=st.booleans(),
        only=st.integers(0, 8) | st.none(),
        suspended=st.sampled_from(["", "", "lost"]),
        lost=st.lists(st.integers(0, 3), max_size=2),
        behind=st.sampled_from([0, 0, 0, 1]),
    )
    def node_says(self, name, phase, state, code, error, tail, follows, only, suspended="", lost=(), behind=0):
        for job in self.hosted(name):
            index = job.host_index(name)
            host = next(iter(job.other_parts(name)), None) if index is None else job.hosts[index]
            if host is None or (host.boot_id != str(self.boots[name]) and phase is not Phase.STOPPED):
                continue
            ranks = tuple(
                LocalRank(rank.rank, state, 1, code, max(0, -code), tail, "", self.now, follows, rank.number)
                for rank in host.ranks
                if only is None or rank.rank == only
            )
            fact = LocalJob(job.job_id, job.generation, phase, "", error, "", ranks, suspended, tuple(lost))
            if job.spec.elastic:
                fact = replace(fact, generation=max(1, job.generation - behind))
            new, _ = observe(job, name, str(self.boots[name]), fact, self.now, self.wall)
            assert observe(new, name, str(self.boots[name]), fact, self.now + 1, self.wall) == (new, ())
            self.put(new)

    # ---- what must hold

    @invariant()
    def steps_are_those_of_the_table(self):
        for history in self.history.values():
            for old, new in zip(history[-2:], history[-1:], strict=False):
                if old is not new and old.state is not new.state:
                    assert new.state in TRANSITIONS[old.state]
                assert new.generation >= old.generation
                if old.state.terminal:
                    assert new.state is old.state
                    assert new.reason == old.reason

    @invariant()
    def the_first_cause_stays_the_reason(self):
        for history in self.history.values():
            stopped = [(job.reason, job.outcome) for job in history if job.state is JobState.STOPPING]
            assert len(set(stopped)) <= 1
            if stopped and history[-1].state.terminal:
                assert (history[-1].reason, history[-1].state) == stopped[0]

    @invariant()
    def slots_are_never_oversubscribed(self):
        for name in NODES:
            assert self.used(name) <= SLOTS

    @invariant()
    def wishes_fit_the_state(self):
        for job in self.jobs.values():
            if job.state in (JobState.STARTING, JobState.RUNNING):
                assert isinstance(wish(job), Run)
                assert len(job.hosts) == job.spec.nnodes or (job.spec.elastic and job.generation > 1)
            else:
                assert not isinstance(wish(job), Run)

    @invariant()
    def every_stop_ends_when_nodes_are_stopped_lost_or_overdue(self):
        views = self.views()
        for job in self.jobs.values():
            if job.state is not JobState.STOPPING:
                continue
            left = [host for host in job.parts if host.phase is not Phase.STOPPED]
            heard = [silent_since(host, views, OPTIONS) for host in left]
            late = job.stopping_clock + job.spec.stop_grace_s + OPTIONS.stop_margin_s
            over = all(self.now >= (late if at is None else at + OPTIONS.gone_s()) for at in heard)
            decision = decide(job, views, self.now, OPTIONS)
            assert (decision.state is job.outcome) is over
            if not over:
                assert decision.wake_at is not None

    @invariant()
    def generations_lose_members_and_gain_none(self):
        for history in self.history.values():
            for old, new in zip(history[-2:], history[-1:], strict=False):
                if not old.generation or old.generation == new.generation:
                    continue
                assert new.spec.elastic and new.generation == old.generation + 1
                before = [rank.number for rank in old.ranks]
                members = [rank.number for rank in new.ranks]
                assert members and members == [number for number in before if number in members]
                assert [rank.rank for rank in new.ranks] == list(range(len(members)))
                assert all(rank.state is RankState.RUNNING for rank in new.ranks)
                assert not any(host.suspended for host in new.hosts)
                assert sorted([*members, *(rank.number for host in new.former for rank in host.ranks)]) == list(
                    range(new.spec.nnodes * new.spec.nproc_per_node)
                )

    @invariant()
    def a_suspended_job_goes_on_or_ends(self):
        views = self.views()
        for job in self.jobs.values():
            runs = any(rank.state is RankState.RUNNING for rank in job.ranks)
            if not job.spec.elastic:  # whose engines suspend nothing, whatever this node says
                continue
            if job.state is JobState.RUNNING and runs and any(host.suspended for host in job.hosts):
                now = decide(job, views, self.now, OPTIONS)
                assert now.regroup or now.state or now.wake_at is not None
                later = decide(job, views, self.now + OPTIONS.lease_s, OPTIONS)
                assert later.regroup or later.state

    @invariant()
    def waiting_jobs_have_a_deadline(self):
        views = self.views()
        for job in self.jobs.values():
            decision = decide(job, views, self.now, OPTIONS)
            if job.state is JobState.PENDING and decision.state is None:
                assert decision.wake_at is not None and decision.wake_at > self.now
                assert decision.reason


Cluster.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCluster = Cluster.TestCase
