"""Elastic jobs: newcomers, losses that meet them, and any order of events."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig.coordinator.elastic_job import OPTIONS, Cluster, killed, over, waits

from bagua.base.end_reasons import SPENT
from bagua.daemon.coordinator.rounds import requests
from bagua.daemon.coordinator.rules.decide import decide
from bagua.daemon.coordinator.rules.domain import JobState, Phase, Plan, RankState
from bagua.daemon.coordinator.rules.joins import growth
from bagua.daemon.coordinator.streams.directives import NOWHERE, Order, wish
from bagua.proto import node_pb2

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
    assert c.told[-2:] == ["the engine of node c listens on ::1:c", "2 newcomers on node c started"]
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


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ({"ranks": (over(4, exit_code=1, reason="KeyError: x"),)}, "exited with code 1: KeyError: x"),
        ({"ranks": (over(4),)}, "rank 0 (member 4) on node c exited with code 0"),
        ({"ranks": (killed(4),)}, "was killed by SIGKILL"),
        ({"error": "no compiler"}, "node c: no compiler"),
        ({"phase": Phase.STOPPED, "ranks": ()}, "node c has nothing left of the job"),
    ],
)
def test_newcomers_fail_alone(fact, words):
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
        order = Order(wish(job), job)
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


def test_newcomers_that_can_not_go_back_are_no_failure():
    """A member was lost when they had entered: others are started at once."""
    c = Cluster("ab", most=3)
    c.there("c")
    c.decide()
    c.says("c", *(over(member, signal=9, reason=SPENT) for member in (4, 5)), phase=Phase.STOPPED)
    assert c.decide().failures == 0 and c.joining() == [("c", [6, 7])]
    c.says("c", *(over(member, exit_code=1) for member in (6, 7)), phase=Phase.STOPPED)
    assert c.decide().failures == 1 and c.joining() == [] and c.job.retry_clock == c.now + OPTIONS.rejoin_s


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


def test_a_lost_rank_costs_its_island_and_whole_ones_join():
    """Nodes have two islands of two ranks. A daemon ends ranks that are in no generation any more."""
    c = Cluster("ab", most=2, respawn=3, per_node=4, island_size=2)
    c.says("a", killed(3, 2.0), replace(killed(2), follows=True))
    assert c.decide().generation == 2 and c.members() == [("a", [0, 1]), ("b", [4, 5, 6, 7])]
    why = "rank 3 of island 1 on node a was killed by SIGKILL; island 1 lost; 3 islands (6 ranks) go on"
    assert c.job.reason == f"generation 2: {why}"
    assert [rank.rank for rank in c.job.ranks] == [0, 1, 2, 3, 4, 5] and len(c.job.former) == 2
    assert c.joining() == [("a", [8, 9])]
    c.enter()
    c.ready("a")
    assert c.job.reason == "generation 3: 1 island (2 ranks) joins on a; 4 islands (8 ranks) from the next step on"
    c.enter()
    assert c.members() == [("a", [0, 1, 8, 9]), ("b", [4, 5, 6, 7])]
    c.enter()
    c.says("b", killed(4), killed(7))
    c.decide()
    c.enter()
    assert c.members() == [("a", [0, 1, 8, 9])] and c.joining() == [], "one an hour is left, and no island is as small"


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


# ---- whatever happens


EVENTS = ("kill", "ready", "enter", "come", "drain", "undrain", "scale", "pause", "resume", "suspend", "stop", "time")


def happens(c, kind, choice):
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
        c.asks(requests.scale, max(c.job.least, 1 + choice % 4))
    elif kind in ("pause", "resume"):
        c.asks(getattr(requests, kind))
    elif kind == "suspend":
        c.says(host.node_id, entered=host.entered, suspended="a connection broke")
    elif kind == "stop":
        for part in [part for part in c.job.former if part.phase is not Phase.STOPPED]:
            c.says(part.node_id, *(over(rank.number) for rank in part.ranks), phase=Phase.STOPPED)
    elif kind == "time":
        c.now += (1.0, 6.0, 120.0)[choice % 3]


def expect_one_word_to_each_node(c):
    """However many parts are there."""
    wanted = wish(c.job)
    assert wanted is not None
    order = Order(wanted, c.job)
    for name in c.views:
        parts = [part for part in c.job.parts if part.node_id == name and part.phase is not Phase.STOPPED]
        words = {order.to(part) for part in parts if order.counts(part)}
        assert len(words) == bool(parts), "a second word would contradict the first"


@settings(max_examples=60, deadline=None)
@given(
    least=st.sampled_from((0, 2)),
    respawn=st.sampled_from((0, 2)),
    island_size=st.sampled_from((1, 2)),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 11)), max_size=25),
)
def test_whatever_happens_members_are_somewhere_and_newcomers_repeat_nothing(least, respawn, island_size, events):
    c = Cluster("ab", least=least, most=4, respawn=respawn, island_size=island_size)
    for kind, choice in events:
        before = c.job
        happens(c, kind, choice)
        c.decide()
        if not c.job.state.under_way:
            return
        c.members()
        expect_one_word_to_each_node(c)
        somewhere = [rank.number for part in c.job.parts for rank in part.ranks]
        assert sorted(somewhere) == list(range(c.job.next_member))
        assert (c.job.state is JobState.WAITING) is c.job.plan.holds
        assert any(not host.new for host in c.job.hosts), "somebody has state"
        assert all(host.nranks % island_size == 0 for host in (*c.job.hosts, *c.job.joining)), "islands are whole"
        new = {rank.number for rank in c.job.ranks} - {rank.number for rank in before.ranks}
        if new and c.job.generation == before.generation + 1:
            assert c.job.plan is Plan.PLANNED, "nobody comes in at once"
    # In the end nothing is left to be done.
    if c.job.paused:
        c.asks(requests.resume)
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
