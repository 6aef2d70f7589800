"""Elastic jobs: newcomers, planned changes, waiting."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.base.errors import ConflictError, InvalidRequestError
from bagua.daemon.coordinator import wishes
from bagua.daemon.coordinator.decide import apply, decide
from bagua.daemon.coordinator.directives import NOWHERE, Order, concerns, wish
from bagua.daemon.coordinator.domain import (
    JobRecord,
    JobSpec,
    JobState,
    LocalJob,
    LocalRank,
    NodeView,
    Options,
    Phase,
    Plan,
    RankState,
)
from bagua.daemon.coordinator.joins import growth
from bagua.daemon.coordinator.observe import forget, observe
from bagua.daemon.node.job_specification import SpecificationError, unpack
from bagua.proto import common_pb2, node_pb2

OPTIONS = Options(lease_s=10, settle_s=1, regroup_s=0.2, stall_s=60, max_stalls=3, join_s=100, rejoin_s=60)
WALL = 1e9
WIRE = common_pb2.JobSpec(elastic=True).SerializeToString()


class Cluster:
    """A job of two ranks on each node, on nodes a, b, ...; what its nodes say, and what is decided."""

    def __init__(self, nodes: str = "ab", least: int = 0, most: int = 4, respawn: int = 0, takes: bool = True) -> None:
        self.now = 100.0
        self.views: dict[str, NodeView] = {}
        self.there(*nodes)
        spec = JobSpec(
            "job", len(nodes), 2, 30, 5.0, 0, WIRE, elastic=True, min_nodes=least, max_nodes=most, respawn=respawn
        )
        self.takes = takes
        self.job = JobRecord("job-1", spec, WALL, submitted_clock=100.0)
        self.decide()
        for name in nodes:
            self.says(name)
        self.decide()
        assert self.job.state is JobState.RUNNING

    def there(self, *names: str, **more) -> None:
        for name in names:
            view = NodeView(name, "", "::1", f"boot {name}", 2, 0, True, 0.0)
            self.views[name] = replace(view, **more)

    def decide(self, at: float = 0.0) -> JobRecord:
        """All steps that are possible now."""
        self.now += at
        used: dict[str, int] = {}
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

    def wake(self) -> float | None:
        return decide(self.job, self.views, self.now, OPTIONS).wake_at

    def says(self, name: str, *special: LocalRank, entered: int = -1, boot: str = "", **more) -> JobRecord:
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
        self.job, _ = observe(self.job, name, boot or f"boot {name}", replace(fact, **more), self.now, WALL)
        return self.job

    def ready(self, *names: str) -> JobRecord:
        """All newcomers there wait for entry."""
        for name in names:
            parts = [part for part in self.job.joining if part.node_id == name]
            present = [host.entered for host in self.job.hosts if host.node_id == name]
            self.says(
                name, *(waits(rank.number) for part in parts for rank in part.ranks), entered=max(present, default=0)
            )
        return self.decide()

    def enter(self, names: str = "", newcomers: bool = False) -> JobRecord:
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

    def asks(self, change, *arguments) -> JobRecord:
        self.job, _ = change(self.job, *arguments)
        return self.decide()

    def members(self) -> list[tuple[str, list[int]]]:
        assert [rank.rank for rank in self.job.ranks] == list(range(len(self.job.ranks)))
        assert [host.index for host in self.job.hosts] == list(range(len(self.job.hosts)))
        indices = [part.index for part in self.job.parts]
        assert len(set(indices)) == len(indices)
        assert {part.index < 0 for part in (*self.job.former, *self.job.joining)} <= {True}
        return [(host.node_id, [rank.number for rank in host.ranks]) for host in self.job.hosts]

    def joining(self) -> list[tuple[str, list[int]]]:
        return [(part.node_id, [rank.number for rank in part.ranks]) for part in self.job.joining]

    def run(self, name: str) -> node_pb2.RunJob:
        """The newest RunJob for a node."""
        wanted = wish(self.job)
        assert wanted is not None
        order = Order(wanted, self.job)
        (host,) = [
            part
            for part in self.job.parts
            if part.node_id == name and concerns(wanted, part) and not (part.index < 0 and name in order.nodes)
        ]
        directive = node_pb2.Directive.FromString(order.to(host))
        assert directive.WhichOneof("directive") == "run"
        return directive.run


def waits(member: int) -> LocalRank:
    return LocalRank(0, RankState.RUNNING, 1, member=member, newcomer=True, ready_to_join=True)


def over(member: int, **more) -> LocalRank:
    return LocalRank(member, RankState.EXITED, 1, member=member, **more)


def killed(member: int) -> LocalRank:
    return over(member, exit_code=-9, signal=9)


# ---- joins


def test_a_new_node_joins_a_running_job():
    c = Cluster("ab")
    c.there("c")
    assert c.decide().generation == 1 and c.joining() == [("c", [4, 5])]
    assert c.members() == [("a", [0, 1]), ("b", [2, 3])]
    run = c.run("c")
    assert (run.generation, run.host_index, len(run.hosts)) == (1, NOWHERE, 2)
    assert [(plan.node_id, list(plan.members), list(plan.ranks)) for plan in run.joining] == [("c", [4, 5], [0, 1])]
    assert c.run("a").host_index == 0 and not c.run("a").planned
    c.says("c")
    assert c.decide().generation == 1, "it is not ready"
    job = c.ready("c")
    assert (job.generation, job.plan, job.state) == (2, Plan.PLANNED, JobState.RUNNING)
    assert job.reason == "generation 2: 2 ranks join on c; 6 ranks from the next step on"
    assert c.members() == [("a", [0, 1]), ("b", [2, 3]), ("c", [4, 5])] and not job.joining and not job.former
    run = c.run("c")
    assert (run.generation, run.host_index, run.planned, run.hold) == (2, 2, True, False)
    assert [list(host.newcomers) for host in run.hosts] == [[], [], [4, 5]]
    assert [host.engine_address for host in run.hosts] == ["::1:a", "::1:b", "::1:c"]
    job = c.enter(newcomers=True)
    assert job.generation == 2 and all(rank.newcomer for rank in job.hosts[2].ranks)
    assert not any(rank.newcomer for rank in c.enter().ranks) and c.job.failures == 0


def test_newcomers_come_in_waves_and_one_that_is_late_holds_nobody_up():
    c = Cluster("a", most=4)
    c.there("b", "c")
    c.decide()
    assert c.joining() == [("b", [2, 3]), ("c", [4, 5])]
    c.ready("b")
    assert c.job.generation == 1 and c.wake() == c.now + OPTIONS.join_wait_s
    c.there("d")
    assert c.decide(OPTIONS.join_wait_s).generation == 2 and c.members() == [("a", [0, 1]), ("b", [2, 3])]
    assert c.joining() == [("c", [4, 5])], "d comes with the next wave"
    c.enter()
    assert c.ready("c").generation == 3
    assert c.enter().generation == 3 and c.joining() == [("d", [6, 7])]


def test_nobody_joins_a_program_that_takes_no_newcomers():
    c = Cluster("a", takes=False)
    c.there("b")
    assert not c.decide().joining
    assert growth(c.job, c.views, c.now).startswith("its program has not said that it takes newcomers")
    c.takes = True
    c.says("a")
    assert c.decide().joining and not growth(c.job, c.views, c.now)


def test_who_wants_no_more_gets_nobody():
    c = Cluster("ab", most=2)
    c.there("c")
    assert not c.decide().joining and not growth(c.job, c.views, c.now)
    c = Cluster("a", most=2)
    assert growth(c.job, c.views, c.now) == "no other node has 2 free slots"


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ({"ranks": (over(4, exit_code=1, error_tail="KeyError: x"),)}, "exited with code 1: KeyError: x"),
        ({"ranks": (over(4),)}, "rank 0 (member 4) on node c exited with code 0"),
        ({"ranks": (killed(4),)}, "was killed by SIGKILL"),
        ({"error": "no compiler"}, "node c: no compiler"),
        ({"phase": Phase.STOPPED, "ranks": ()}, "node c has nothing left of the job"),
    ],
)
def test_newcomers_fail_alone(fact, words: str):
    c = Cluster("ab")
    c.there("c")
    c.decide()
    c.says("c", **fact)
    decision = decide(c.job, c.views, c.now, OPTIONS)
    assert decision.wave is not None and words in decision.wave.reason
    job = c.decide()
    assert (job.state, job.generation, c.joining()) == (JobState.RUNNING, 1, [])
    assert [part.node_id for part in job.former] == ["c"] and job.former[0].last_generation == 0
    if job.former[0].phase is not Phase.STOPPED:
        order = Order(wish(job), job)  # type: ignore[arg-type]
        assert node_pb2.Directive.FromString(order.to(job.former[0])).WhichOneof("directive") == "stop"
        c.says("c", phase=Phase.STOPPED)
    assert not c.decide(59.0).joining and c.wake() == job.retry_clock
    assert growth(c.job, c.views, c.now) == "newcomers have failed; the next ones are started in 1 s"
    assert c.decide(1.0).joining and c.joining() == [("c", [6, 7])], "tried again, with numbers of their own"
    c.says("c", killed(6))
    c.decide()
    assert c.job.retry_clock == c.now + 120


def test_a_newcomer_that_is_never_ready_is_given_up():
    c = Cluster("ab")
    c.there("c")
    c.decide()
    c.says("c")
    assert c.wake() == 100.0 + OPTIONS.join_s
    assert not c.decide(OPTIONS.join_s).joining and c.job.generation == 1
    late = [part for part in c.job.former if part.phase is not Phase.STOPPED]
    assert [part.node_id for part in late] == ["c"], "its slots are free once it has stopped"


def test_a_fact_that_is_older_than_the_newcomers_says_nothing_of_them():
    c = Cluster("ab")
    c.there("c")
    before = c.decide()
    assert c.says("c", ranks=(killed(9),), phase=Phase.STOPPED) == before
    assert forget(before, "c", "boot c", c.now, WALL)[0] == before, "it will be told"


def test_lost_ranks_are_replaced_on_their_node():
    c = Cluster("ab", most=2, respawn=1)
    c.says("a", killed(1))
    assert c.decide().generation == 2 and c.joining() == [("a", [4])]
    run = c.run("a")
    assert run.host_index == 0 and [list(plan.members) for plan in run.joining] == [[4]]
    assert c.ready("a").generation == 2, "first everybody enters the generation without it"
    assert c.enter().generation == 3 and c.members() == [("a", [0, 4]), ("b", [2, 3])]
    c.enter()
    c.says("a", killed(4))
    c.decide()
    c.enter()
    assert c.joining() == [] and c.job.generation == 4, "one an hour"
    assert growth(c.job, c.views, c.now) == "its ranks were replaced too often"
    c.decide(3_601.0)
    assert c.joining() == [("a", [5])]


# ---- losses meet newcomers


def test_a_newcomer_that_dies_before_its_step_costs_the_others_nothing():
    c = Cluster("ab")
    c.there("c")
    c.decide()
    c.ready("c")
    c.says("a", entered=1)
    c.says("c", killed(4), waits(5), entered=2)
    job = c.decide()
    assert (job.generation, job.plan) == (3, Plan.PLANNED)
    assert c.members() == [("a", [0, 1]), ("b", [2, 3]), ("c", [5])]
    c.says("c", killed(5), entered=2)
    job = c.decide()
    assert (job.generation, job.plan, c.members()) == (4, Plan.PLANNED, [("a", [0, 1]), ("b", [2, 3])])


def test_a_loss_before_the_step_sends_newcomers_back_to_the_lobby():
    c = Cluster("abc")
    c.there("d")
    c.decide()
    c.ready("d")
    assert c.job.plan is Plan.PLANNED
    c.says("a", entered=1)
    c.says("b", killed(2), entered=1, suspended="rank 2 is gone")
    job = c.decide()
    assert (job.generation, job.plan) == (3, Plan.AT_ONCE)
    assert c.members() == [("a", [0, 1]), ("b", [3]), ("c", [4, 5])] and c.joining() == [("d", [6, 7])]
    assert job.joining[0].ready and c.run("d").host_index == NOWHERE
    job = c.enter()
    assert (job.generation, job.plan, c.joining()) == (4, Plan.PLANNED, []), "they come when all have entered"


def test_a_loss_after_the_step_keeps_newcomers():
    c = Cluster("abc")
    c.there("d")
    c.decide()
    c.ready("d")
    c.enter("a", newcomers=True)
    c.says("b", killed(2), entered=1, suspended="rank 2 is gone")
    job = c.decide()
    assert (job.generation, job.plan) == (3, Plan.AT_ONCE)
    assert c.members() == [("a", [0, 1]), ("b", [3]), ("c", [4, 5]), ("d", [6, 7])]


def test_an_exception_of_a_newcomer_without_state_is_a_loss():
    c = Cluster("ab")
    c.there("c")
    c.decide()
    c.ready("c")
    c.enter(newcomers=True)
    c.says("c", *(over(member, exit_code=1, error_tail="other model") for member in (4, 5)))
    c.says("a", suspended="host 2 hung up", suspended_nodes=("c",))
    job = c.decide()
    assert (job.state, job.generation, c.members()) == (JobState.RUNNING, 3, [("a", [0, 1]), ("b", [2, 3])])
    assert "other model" in job.reason


def test_the_last_who_has_state():
    c = Cluster("a")
    c.there("b")
    c.decide()
    c.ready("b")
    c.says("a", killed(0), killed(1), entered=1)
    job = c.decide()
    assert (job.state, job.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert job.reason.endswith("no rank is left that runs")


def test_a_job_that_ends_waits_for_no_newcomer():
    c = Cluster("a")
    c.there("b")
    c.decide()
    c.ready("b")
    c.says("a", over(0), over(1), entered=1)
    job = c.decide()
    assert (job.state, job.outcome) == (JobState.STOPPING, JobState.SUCCEEDED)


# ---- planned changes


def test_scale_down_and_up():
    c = Cluster("abc", least=1, most=3)
    job = c.asks(wishes.scale, 1)
    assert (job.generation, job.plan, c.members()) == (2, Plan.PLANNED, [("a", [0, 1])])
    assert job.reason == "generation 2: b, c leave; 2 ranks from the next step on"
    run = c.run("b")
    assert (run.host_index, run.planned, [host.node_id for host in run.hosts]) == (NOWHERE, True, ["a"])
    job = c.asks(wishes.scale, 3)
    assert not job.joining, "first the change takes place"
    c.enter()
    assert c.run("b").planned, "whatever the others do"
    assert not c.job.joining, "there is room once they have gone"
    c.says("b", over(2), over(3), phase=Phase.STOPPED, entered=1)
    job = c.decide()
    assert c.joining() == [("b", [6, 7])] and job.former[0].phase is Phase.STOPPED
    c.says("c", over(4), over(5), phase=Phase.STOPPED, entered=1)
    c.ready("b")
    c.enter()
    assert c.joining() == [("c", [8, 9])]


def test_newcomers_that_are_not_wanted_any_more():
    c = Cluster("a", most=3)
    c.there("b", "c")
    c.decide()
    c.asks(wishes.scale, 2)
    assert c.joining() == [("b", [2, 3])] and c.job.failures == 0


def test_who_was_dismissed_and_hangs_is_stopped():
    """A loss lets the others go on at once, so nobody waits for the step of that rank any more."""
    c = Cluster("abc")
    c.asks(wishes.scale, 2)
    assert c.run("c").planned
    c.decide(at=1000.0)
    assert c.run("c").planned, "the step may take long"
    c.says("b", *(killed(rank.number) for rank in c.job.hosts[1].ranks), entered=1)
    c.decide()
    c.enter()
    (part,) = [part for part in c.job.former if part.node_id == "c"]
    assert part.dismissed and c.wake() is not None
    c.decide(at=OPTIONS.leave_s - 1)
    assert next(part for part in c.job.former if part.node_id == "c").dismissed
    job, events = apply(c.job, decide(c.job, c.views, c.now + 1, OPTIONS), c.now + 1, WALL)
    assert [(event.kind, event.reason) for event in events] == [
        ("stopped", "c is stopped: its ranks were to leave, and have not ended 90 s after the others went on")
    ]
    (part,) = [part for part in job.former if part.node_id == "c"]
    order = node_pb2.Directive.FromString(Order(wish(job), job).to(part))
    assert order.stop.generation == job.generation and order.stop.grace_s == 5.0


def test_a_drained_node_leaves_and_another_comes():
    c = Cluster("ab", most=2)
    c.there("c")
    assert not c.decide().joining
    c.views["b"] = replace(c.views["b"], asked_to_drain=True)
    c.decide()
    assert c.members() == [("a", [0, 1])] and [part.node_id for part in c.job.former if part.dismissed] == ["b"]
    c.enter()
    assert c.joining() == [("c", [4, 5])]


def test_a_drained_node_stays_until_the_minimum_is_there_without_it():
    c = Cluster("ab", least=2, most=2)
    c.views["b"] = replace(c.views["b"], leaving=True)
    assert c.decide().generation == 1
    c.there("c")
    c.decide()
    assert c.joining() == [("c", [4, 5])] and c.job.generation == 1
    c.ready("c")
    assert (c.job.plan, c.members()) == (Plan.PLANNED, [("a", [0, 1]), ("c", [4, 5])])


def test_the_last_node_that_drains_leaves_when_another_has_state():
    c = Cluster("a", most=1)
    c.views["a"] = replace(c.views["a"], leaving=True)
    c.there("b")
    c.decide()
    c.ready("b")
    assert (c.job.generation, c.members()) == (2, [("a", [0, 1]), ("b", [2, 3])])
    assert c.enter(newcomers=True).generation == 2
    assert c.enter().generation == 3 and c.members() == [("b", [2, 3])]


def test_pause_and_resume():
    c = Cluster("ab")
    job = c.asks(wishes.pause)
    assert (job.state, job.reason, job.generation, job.plan) == (JobState.WAITING, "paused", 2, Plan.HOLD)
    run = c.run("a")
    assert (run.planned, run.hold, run.waiting, len(run.hosts)) == (True, True, "paused", 2)
    c.there("c")
    assert not c.decide().joining
    job = c.asks(wishes.resume)
    assert (job.state, job.generation, job.plan) == (JobState.RUNNING, 3, Plan.PLANNED)
    assert job.reason == "generation 3: it goes on; 4 ranks from the next step on"
    c.says("a", entered=1)
    assert c.decide().generation == 3
    assert c.enter().joining


def test_a_loss_in_a_pause():
    c = Cluster("abc")
    c.asks(wishes.pause)
    c.says("b", killed(2), entered=1, suspended="rank 2 is gone")
    job = c.decide()
    assert (job.state, job.generation, job.plan) == (JobState.WAITING, 3, Plan.STANDSTILL)
    assert c.members()[1] == ("b", [3]) and job.reason == "paused; rank 2 on node b was killed by SIGKILL"
    assert c.run("a").hold and c.decide(1_000.0).generation == 3
    job = c.asks(wishes.resume)
    assert (job.state, job.generation, job.plan) == (JobState.RUNNING, 4, Plan.AT_ONCE), (
        "a step may have to be repeated"
    )


def test_a_broken_connection_in_a_pause():
    c = Cluster("ab")
    c.asks(wishes.pause)
    c.says("a", entered=1, suspended="host 1 hung up", suspended_nodes=("b",))
    assert c.decide(100.0).generation == 2
    assert c.asks(wishes.resume).plan is Plan.AT_ONCE


def test_below_the_minimum_a_job_waits():
    c = Cluster("ab", least=2)
    c.says("b", killed(2), killed(3))
    c.says("a", entered=1, suspended="host 1 hung up", suspended_nodes=("b",))
    job = c.decide()
    assert (job.state, job.plan, c.members()) == (JobState.WAITING, Plan.STANDSTILL, [("a", [0, 1])])
    assert job.reason.startswith("1 of 2 nodes: rank 2 on node b was killed by SIGKILL")
    assert c.run("a").waiting == job.reason and c.joining() == [], "b holds something of it still"
    c.says("b", killed(2), killed(3), phase=Phase.STOPPED)
    assert c.decide().joining and c.job.state is JobState.WAITING


def test_newcomers_end_a_wait():
    c = Cluster("ab", least=2)
    c.says("b", killed(2), killed(3), phase=Phase.STOPPED)
    c.says("a", entered=1, suspended="host 1 hung up", suspended_nodes=("b",))
    c.decide()
    assert c.job.state is JobState.WAITING and c.joining() == [("b", [4, 5])]
    job = c.ready("b")
    assert (job.state, job.plan, c.members()) == (JobState.RUNNING, Plan.AT_ONCE, [("a", [0, 1])]), "the step first"
    assert c.joining() == [("b", [4, 5])]
    job = c.enter()
    assert (job.generation, job.plan, c.members()) == (4, Plan.PLANNED, [("a", [0, 1]), ("b", [4, 5])])


def test_newcomers_that_die_meanwhile_leave_it_waiting():
    c = Cluster("ab", least=2)
    c.says("b", killed(2), killed(3), phase=Phase.STOPPED)
    c.says("a", entered=1, suspended="host 1 hung up", suspended_nodes=("b",))
    c.decide()
    c.ready("b")
    c.says("b", killed(4), killed(5))
    c.decide()
    assert c.job.state is JobState.RUNNING, "everybody enters first"
    job = c.enter()
    assert (job.state, job.plan, job.reason) == (JobState.WAITING, Plan.HOLD, "1 of 2 nodes")


def test_the_last_one_dies_while_the_job_waits():
    c = Cluster("ab", least=2)
    c.says("b", killed(2), killed(3), phase=Phase.STOPPED)
    c.decide()
    c.says("a", killed(0), killed(1))
    assert (c.decide().state, c.job.outcome) == (JobState.STOPPING, JobState.FAILED)


def test_a_wait_that_nobody_could_end_is_none():
    c = Cluster("ab", least=2, takes=False)
    c.says("b", killed(2), killed(3))
    job = c.decide()
    assert (job.state, job.outcome) == (JobState.STOPPING, JobState.FAILED)
    assert job.reason.endswith("the job needs at least 2: its program takes no newcomers")


def test_a_waiting_job_can_be_cancelled():
    c = Cluster("ab")
    c.asks(wishes.pause)
    c.job = replace(c.job, cancel_reason="cancelled")
    assert c.decide().outcome is JobState.CANCELLED


# ---- silence


def test_who_is_silent_and_accused_is_out_before_its_lease_is_over():
    c = Cluster("abc")
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.views["b"] = replace(c.views["b"], heard_clock=c.now - OPTIONS.silence_s)
    c.decide()
    assert c.job.reason == "generation 2: node b is silent, and node a has lost it; 4 ranks go on"


def test_a_daemon_that_is_started_again_has_its_time_from_the_loss_on():
    """Its last word may have been nearly a heartbeat old when it was killed."""
    c = Cluster("abc")
    c.says("a", suspended="the connection broke", suspended_nodes=("b",))
    c.views["b"] = replace(c.views["b"], heard_clock=c.now - 2.9)
    c.decide()
    assert c.job.generation == 1 and c.wake() == c.now + OPTIONS.silence_s
    c.decide(OPTIONS.silence_s)
    assert c.job.reason == "generation 2: node b is silent, and node a has lost it; 4 ranks go on"


def test_who_talks_to_another_coordinator_is_not_taken_for_silent():
    c = Cluster("abc")
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.says("b", suspended="no word from host 0", suspended_nodes=("a",))
    c.views["b"] = replace(c.views["b"], heard_clock=0.0)
    assert c.decide(1.0).generation == 2 and len(c.members()) == 3


# ---- wishes that can't be met


def test_refusals():
    c = Cluster("ab", least=2, most=3)
    with pytest.raises(InvalidRequestError, match="submitted for 2 to 3 nodes"):
        wishes.scale(c.job, 4)
    with pytest.raises(InvalidRequestError):
        wishes.scale(c.job, 1)
    plain = replace(c.job, spec=replace(c.job.spec, elastic=False))
    for change in (wishes.pause, wishes.resume):
        with pytest.raises(ConflictError, match="is not elastic"):
            change(plain)
    with pytest.raises(ConflictError, match="once all its ranks were started"):
        wishes.pause(replace(c.job, state=JobState.PENDING))
    with pytest.raises(ConflictError, match="is being stopped"):
        wishes.pause(replace(c.job, state=JobState.STOPPING))
    wishes.last_of("a", [c.job])
    alone = Cluster("a")
    with pytest.raises(ConflictError, match="is the last one of job job-1"):
        wishes.last_of("a", [alone.job])


def test_who_is_accused_and_speaks_is_no_loss():
    c = Cluster("abc")
    c.says("a", suspended="no word from host 1", suspended_nodes=("b",))
    c.says("b", suspended="no word from host 0", suspended_nodes=("a",))
    for name in "ab":
        c.views[name] = replace(c.views[name], heard_clock=c.now)
    assert c.decide().generation == 1 and c.wake() == pytest.approx(c.now + OPTIONS.regroup_s)
    assert c.decide(0.3).generation == 2 and len(c.members()) == 3


# ---- whatever happens


EVENTS = ("kill", "ready", "enter", "come", "drain", "undrain", "scale", "pause", "resume", "suspend", "stop", "time")


def happens(c: Cluster, kind: str, choice: int) -> None:
    name = "abcd"[choice % 4]
    ranks = [rank for part in (*c.job.hosts, *c.job.joining) for rank in part.ranks if rank.state is RankState.RUNNING]
    host = c.job.hosts[choice % len(c.job.hosts)]
    if kind == "kill" and ranks:
        victim = ranks[choice % len(ranks)]
        c.says(victim.node_id, killed(victim.number))
    elif kind == "ready" and c.job.joining:
        c.ready(c.job.joining[choice % len(c.job.joining)].node_id)
    elif kind == "enter" and not c.job.plan.holds:
        c.enter("" if choice % 2 else host.node_id, newcomers=choice % 3 == 0)
    elif kind == "come" and name not in c.views:
        c.there(name)
    elif kind in ("drain", "undrain") and name in c.views:
        c.views[name] = replace(c.views[name], asked_to_drain=kind == "drain")
    elif kind == "scale":
        c.asks(wishes.scale, max(c.job.least, 1 + choice % 4))
    elif kind in ("pause", "resume"):
        c.asks(getattr(wishes, kind))
    elif kind == "suspend":
        c.says(host.node_id, entered=host.entered, suspended="a connection broke")
    elif kind == "stop":
        for part in [part for part in c.job.former if part.phase is not Phase.STOPPED]:
            c.says(part.node_id, *(over(rank.number) for rank in part.ranks), phase=Phase.STOPPED)
    elif kind == "time":
        c.now += (1.0, 6.0, 120.0)[choice % 3]


@settings(max_examples=60, deadline=None)
@given(
    least=st.sampled_from((0, 2)),
    respawn=st.sampled_from((0, 2)),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), max_size=25),
)
def test_whatever_happens_members_are_somewhere_and_newcomers_repeat_nothing(least, respawn, events):
    c = Cluster("ab", least=least, most=4, respawn=respawn)
    for kind, choice in events:
        before = c.job
        happens(c, kind, choice)
        c.decide()
        if not c.job.state.under_way:
            return
        c.members()
        somewhere = [rank.number for part in c.job.parts for rank in part.ranks]
        assert sorted(somewhere) == list(range(c.job.next_member))
        assert (c.job.state is JobState.WAITING) is c.job.plan.holds
        assert any(not host.new for host in c.job.hosts), "somebody has state"
        new = {rank.number for rank in c.job.ranks} - {rank.number for rank in before.ranks}
        if new and c.job.generation == before.generation + 1:
            assert c.job.plan is Plan.PLANNED, "nobody comes in at once"
    # In the end nothing is left to be done.
    if c.job.paused:
        c.asks(wishes.resume)
    for _ in range(40):
        for kind, choice in (("stop", 0), ("time", 0), ("ready", 0), ("ready", 1)):
            happens(c, kind, choice)
        if not c.job.plan.holds:
            c.enter()
        c.decide()
        if not c.job.state.under_way:
            return
    assert not c.job.joining or c.job.plan.holds or c.wake() is not None
    assert c.job.plan.holds or all(host.entered == c.job.generation for host in c.job.hosts)


# ---- large jobs


def test_a_large_directive_is_packed_for_daemons_that_unpack():
    c = Cluster("ab")
    job = replace(c.job, hosts=tuple(replace(host, address="a" * 3000) for host in c.job.hosts))
    order = Order(wish(job), job)
    plain, packed = (order.to(job.hosts[1], packs) for packs in (False, True))
    assert len(packed) < len(plain) / 10
    run = node_pb2.Directive.FromString(packed).run
    assert not run.hosts and run.host_index == 1
    unpack(run)
    assert run == node_pb2.Directive.FromString(plain).run
    small = Order(wish(c.job), c.job)
    assert small.to(c.job.hosts[0], True) == small.to(c.job.hosts[0], False)


@pytest.mark.parametrize("packed", [b"no zlib", zlib.compress(b"\xff" * 100), zlib.compress(bytes(17 << 20))])
def test_a_packed_directive_that_is_none(packed: bytes):
    with pytest.raises(SpecificationError, match="a packed directive"):
        unpack(node_pb2.RunJob(packed=packed))
