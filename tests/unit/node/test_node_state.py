"""The life of a job on a node, without processes; elastic ones with losses, newcomers and planned changes."""

import math
import signal
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagua.base.end_reasons import SPENT
from bagua.daemon.node.rules import events as ev
from bagua.daemon.node.rules import membership, transitions
from bagua.daemon.node.rules import state as s
from bagua.daemon.node.rules.state import Phase, RankPhase
from bagua.proto import common_pb2

READY = ev.EngineReady("")
TAIL = "ValueError: x"


def drive(job, *events, now=0.0):
    """(state, instructions of all steps but reports)"""
    told = []
    for event in events:
        job, instructions = transitions.step(job, event, now)
        told += instructions
    return job, [instruction for instruction in told if not isinstance(instruction, ev.Report)]


def new(*, adopt=False, ranks=(2, 3)):
    return s.new_job("b", ranks, adopt=adopt, grace_s=7.0, join_s=60.0)


def running(**options):
    events = [READY]
    if options.get("adopt"):
        events += [ev.RankJoined(2, 72), ev.RankJoined(3, 73)]
    else:
        events += [ev.RankStarted(2, 72), ev.RankStarted(3, 73)]
    return drive(new(**options), *events)[0]


def exited(rank, code=0, signum=0):
    return ev.RankExited(rank, code, signum, TAIL if code else "", 1000.0)


def test_a_job_without_trouble():
    job, told = drive(new(), READY)
    assert job.phase is Phase.RUNNING and told == [ev.SpawnRanks()]
    job, told = drive(running(), exited(2), exited(3))
    assert job.phase is Phase.RUNNING and not told, "the engine serves other hosts until the coordinator says stop"
    job, told = drive(job, ev.StopRequested("succeeded", 5.0))
    assert told == [ev.CloseEngine()] and job.phase is Phase.CLOSING, "nobody is left to be told of a reason"
    job, told = drive(job, ev.EngineClosed())
    assert job.phase is Phase.STOPPED and job.error == ""


def test_the_engine_is_told_why_before_anybody_is_killed():
    job, told = drive(running(), exited(2, -9, 9), now=10.0)
    assert told == [ev.Abort("rank 2 (pid 72) on node b was killed by SIGKILL")]
    assert job.phase is Phase.FAILING and job.deadline == 10.0 + transitions.FAILING_S and job.error == ""
    after, told = drive(job, exited(3, 1), ev.EngineFailed("an echo"), now=11.0)
    assert not told and after.failure == job.failure and after.error == "", "the first cause stays"
    job, told = drive(job, ev.TimerFired(), now=15.0)
    assert told == [ev.SignalRanks((73,), signal.SIGTERM)] and job.deadline == 22.0, "no word from the coordinator"
    job, told = drive(job, ev.TimerFired(), now=22.0)
    assert told == [ev.SignalRanks((73,), signal.SIGKILL)] and job.phase is Phase.KILLING
    job, told = drive(job, exited(3, -9, 9))
    assert told == [ev.CloseEngine()]


def test_stop():
    job, told = drive(running(), ev.StopRequested("cancelled", 3.0), now=1.0)
    assert told == [ev.Abort("cancelled"), ev.SignalRanks((72, 73), signal.SIGTERM)] and job.deadline == 4.0
    shorter, _ = drive(job, ev.StopRequested("again", 1.0), now=2.0)
    longer, _ = drive(job, ev.StopRequested("again", 60.0), now=2.0)
    assert shorter.deadline == 3.0 and longer.deadline == 4.0
    job, told = drive(job, exited(2, -15, 15), exited(3, 1))
    assert told == [ev.CloseEngine()] and job.phase is Phase.CLOSING
    stopped, told = drive(new(), ev.StopRequested("cancelled", 3.0))
    assert stopped.phase is Phase.STOPPED and not told
    assert drive(stopped, READY)[1] == [ev.CloseEngine()], "an engine that came too late is closed"


def test_trouble_before_the_start():
    job, told = drive(new(), ev.PrepareFailed("no compiler"))
    assert job.phase is Phase.STOPPED and job.error == "no compiler" and not told
    job, told = drive(new(), READY, ev.RankStarted(2, 72), ev.SpawnFailed(3, "no such file"))
    assert told == [ev.SpawnRanks(), ev.Abort("no such file")] and job.error == "no such file"


def test_an_engine_error_waits_for_the_verdict_on_a_lost_rank():
    """The kernel closes a dying process's sockets before it says that it is dead."""
    job, told = drive(running(), ev.RankLost(2, "hang-up", 0.0), ev.EngineFailed("rank 2 is gone"), now=1.0)
    assert not told and job.phase is Phase.RUNNING and job.deadline == 1.0 + transitions.VERDICT_S
    died, told = drive(job, exited(2, -9, 9), now=1.01)
    assert told == [ev.Abort("rank 2 (pid 72) on node b was killed by SIGKILL")] and died.error == ""
    lives, told = drive(job, ev.TimerFired(), now=1.6)
    assert told == [ev.Abort("rank 2 is gone")] and lives.error == "rank 2 is gone"
    for events in ([ev.RankLost(2, "", 0.0), exited(2)], [exited(2), ev.RankLost(2, "", 0.0)]):
        well, told = drive(running(), *events, ev.EngineFailed("rank 2 is gone"), ev.TimerFired(), now=1.0)
        well, told = drive(well, ev.TimerFired(), now=1.6)
        assert not told and well.error == "" and well.deadline is None, "whoever misses it will fail by itself"
    other, told = drive(running(), ev.EngineFailed("host c is lost"))
    assert told == [ev.Abort("host c is lost")] and other.error == "host c is lost"


def test_ranks_that_end_after_a_failure_are_marked():
    """The coordinator looks for the cause among the others, not among their messages."""

    def follows(*events, **options):
        return [rank.follows for rank in drive(running(**options), *events, now=1.0)[0].ranks]

    assert follows(exited(2, 1), exited(3, 1)) == [False, True]
    gone = (ev.RankLost(2, "", 0.0), ev.EngineFailed("rank 2 is gone"))
    assert follows(*gone, exited(3, 1), exited(2, -9, 9)) == [False, True]
    told_late = (ev.RankLost(2, "", 0.0), ev.RankLost(3, "", 0.0, after_error=True), gone[1])
    assert follows(*told_late, exited(3, 1), exited(2, 1)) == [False, True]
    assert follows(*told_late, adopt=True) == [False, True]
    assert follows(ev.EngineFailed("host c is lost"), exited(2, 1), exited(3, 1)) == [True, True]


def test_a_rank_that_tells_why_it_fails_is_the_cause():
    job, told = drive(running(), ev.RankTold(2, "ValueError: 3", 0.0), ev.EngineFailed("rank 2 has failed"), now=1.0)
    assert told == [ev.Abort("rank 2 (pid 72) has failed: ValueError: 3")] and job.error == ""
    assert job.phase is Phase.FAILING and job.deadline == 1.0 + transitions.TOLD_S
    job, _ = drive(job, exited(3, 1), exited(2, 7), now=2.0)
    assert [(rank.exit_code, rank.reason, rank.follows) for rank in job.ranks] == [
        (7, "ValueError: 3", False),
        (1, "", True),
    ]
    slow, _ = drive(running(), ev.RankTold(2, "ValueError: 3", 0.0), exited(2, -15, 15))
    assert (slow.ranks[0].exit_code, slow.ranks[0].signal) == (1, 0), "it has failed, and was not killed"
    adopted, _ = drive(running(adopt=True), ev.RankTold(2, "ValueError: 3", 0.0))
    assert (adopted.ranks[0].phase, adopted.ranks[0].exit_code) == (RankPhase.EXITED, 1), "nobody tells more of it"


RANK = st.sampled_from([2, 3, 9])
EVENTS = st.one_of(
    st.just(READY),
    st.builds(ev.PrepareFailed, st.just("prepare")),
    st.builds(ev.PeersKnown, st.just(("a", "b"))),
    st.builds(ev.RankStarted, RANK, st.integers(70, 80)),
    st.builds(ev.SpawnFailed, RANK, st.just("spawn")),
    st.builds(ev.RankJoined, RANK, st.integers(70, 80)),
    st.builds(ev.RankConnected, RANK),
    st.builds(ev.RankLeft, RANK, st.just(1.0)),
    st.builds(ev.RankLost, RANK, st.just("lost"), st.just(1.0)),
    st.builds(ev.RankTold, RANK, st.just("told"), st.just(1.0), st.booleans()),
    st.builds(exited, RANK, st.sampled_from([0, 1])),
    st.builds(ev.EngineFailed, st.just("engine")),
    st.builds(ev.WaitsChanged, st.sampled_from(["", "a waits for b"])),
    st.builds(ev.StopRequested, st.just("stop"), st.floats(0, 10)),
    st.just(ev.TimerFired()),
    st.just(ev.EngineClosed()),
)
ORDER = list(Phase)


@given(st.booleans(), st.lists(st.tuples(EVENTS, st.floats(0, 5)), max_size=40))
def test_whatever_happens(adopt, steps):
    """Phases never go back, the first cause stays, one abort, one spawn, every ending phase has an end."""
    job, now, told = new(adopt=adopt), 0.0, []
    for event, passed in steps:
        now += passed
        before = job
        job, instructions = transitions.step(job, event, now)
        told += instructions
        assert ORDER.index(job.phase) >= ORDER.index(before.phase)
        assert before.failure in ("", job.failure)
        for old, fresh in zip(before.ranks, job.ranks, strict=True):
            if old.phase is RankPhase.EXITED:  # final
                assert replace(fresh, lost=old.lost, connected=old.connected) == old
        if before.visible != job.visible:
            assert isinstance(instructions[-1], ev.Report)
        if job.phase in (Phase.FAILING, Phase.TERMINATING, Phase.KILLING):
            assert job.deadline is not None
        assert job.phase is not Phase.STOPPED or not job.waiting, "an ended job waits for nothing"
        if adopt:
            assert not any(isinstance(instruction, ev.SignalRanks | ev.SpawnRanks) for instruction in told)
    assert sum(isinstance(instruction, ev.Abort) for instruction in told) <= 1
    assert sum(isinstance(instruction, ev.SpawnRanks) for instruction in told) <= 1
    assert sum(isinstance(instruction, ev.SetPeers) for instruction in told) <= 1
    _comes_to_an_end(job, now)


def _comes_to_an_end(job, now):
    """From anywhere: a stop, time, and no process that dies, and yet the job ends."""
    job, _ = transitions.step(job, ev.StopRequested("stop", 1.0), now)
    for _ in range(3):
        now += 60.0
        job, _ = transitions.step(job, ev.TimerFired(), now)
    job, _ = transitions.step(job, ev.EngineClosed(), now)
    assert job.phase is Phase.STOPPED


# ---- elastic jobs


def elastic(*, started=True):
    events = [READY, ev.RankStarted(2, 72), ev.RankStarted(3, 73)]
    job = s.new_job("b", (2, 3), adopt=False, grace_s=7.0, elastic=True)
    return drive(job, *(events if started else []))[0]


def reports(job, *events, now=0.0):
    """How many of the events are worth a word to the coordinator."""
    found = 0
    for event in events:
        job, told = transitions.step(job, event, now)
        found += any(isinstance(instruction, ev.Report) for instruction in told)
    return found


def test_a_killed_rank_of_an_elastic_job_is_no_failure():
    job, told = drive(elastic(), ev.RankLost(2, "hang-up", 0.0), exited(2, -9, 9))
    assert not told and job.phase is Phase.RUNNING and not job.error and not job.failure
    assert [rank.signal for rank in job.ranks] == [9, 0] and not job.ranks[0].follows
    job, told = drive(elastic(), exited(2, 1))
    assert told == [ev.Abort("rank 2 (pid 72) on node b exited with code 1")], "an exception ends the job"
    job, told = drive(elastic(), ev.RankLost(2, "", 0.0), ev.EngineFailed("shapes differ"))
    assert told == [ev.Abort("shapes differ")] and job.error == "shapes differ"


@pytest.mark.parametrize("told", [True, False])
def test_a_kill_below_a_rank_is_a_loss(told):
    """A worker of its DataLoader, as it tells; or its program below a shell, as the exit code says."""
    events = [ev.RankTold(2, "a worker was killed", 0.0, lost=True), exited(2, 1)] if told else [exited(2, 137)]
    job, instructions = drive(elastic(), *events)
    assert not instructions and job.phase is Phase.RUNNING and not job.failure
    assert (job.ranks[0].exit_code, job.ranks[0].signal) == (-9, 9)
    assert job.ranks[0].reason == ("a worker was killed" if told else "")


def island(*events):
    """Two islands of two ranks; all run."""
    job = s.new_job("b", (2, 3, 4, 5), adopt=False, grace_s=7.0, elastic=True, island_size=2)
    return drive(job, READY, *(ev.RankStarted(member, 70 + member) for member in (2, 3, 4, 5)), *events)[0]


ENDS = ev.RankLost(2, "hang-up", 0.0), exited(2, -9, 9), ev.RankTold(2, "^C", 0.0, lost=True)


@pytest.mark.parametrize("end", ENDS)
def test_a_lost_rank_takes_its_island_with_it(end):
    """Without a word of the coordinator, and whatever torch's group says of it to the others."""
    job, told = drive(island(), end)
    assert told == [ev.SignalRanks((73,), signal.SIGKILL)]
    assert "Rank 2 of its island was lost" in membership.ended_here(job, 3)
    job, told = drive(job, exited(2, -9, 9), ev.RankTold(3, "Connection closed by peer", 0.0, lost=False), exited(3, 1))
    assert not told and job.phase is Phase.RUNNING and not job.failure
    assert [(rank.signal, rank.follows) for rank in job.ranks] == [(9, False), (9, True), (0, False), (0, False)]
    assert drive(island(ev.RankLeft(3, 0.0)), end)[1] == [], "it has left, and ends by itself"


def test_the_first_lost_rank_of_an_island_is_its_reason():
    """Also where a mate that was killed for it ends before it."""
    job, _ = drive(island(), ev.RankLost(2, "connection closed", 0.0), exited(3, -9, 9), exited(2, -9, 9))
    assert [rank.follows for rank in job.ranks[:2]] == [False, True]
    assert "Rank 2 of its island" in job.ranks[1].reason and "island" not in job.ranks[0].reason


@pytest.mark.parametrize("end", ENDS[:2])
def test_an_error_of_torchs_group_may_be_told_before_the_loss_behind_it(end):
    job, told = drive(island(), ev.RankTold(3, "Connection closed by peer", 0.0, lost=False))
    assert not told and job.phase is Phase.RUNNING
    job, _ = drive(job, end, exited(3, 1), exited(2, -9, 9))
    assert job.phase is Phase.RUNNING and [rank.signal for rank in job.ranks] == [9, 9, 0, 0]


def test_an_exception_in_an_island_ends_the_job():
    """The other rank's error of torch's group follows it, whichever ends first."""
    told_first = ev.RankTold(2, "ValueError: no", 0.0, lost=False), ev.RankTold(3, "closed by peer", 0.0, lost=False)
    job, told = drive(island(), *told_first, exited(2, 1), exited(3, 1))
    assert told == [ev.Abort("rank 2 (pid 72) on node b exited with code 1")]
    assert [rank.follows for rank in job.ranks[:2]] == [False, True]
    job, told = drive(island(), told_first[0], ev.TimerFired(), now=membership.LOST_S + 1)
    assert not job.ranks[0].signal and job.deadline == 2 * membership.LOST_S + 1, "its interpreter hangs"


def test_a_daemon_that_stops_does_not_end_the_job_of_the_others():
    _, told = drive(elastic(), ev.StopRequested("SIGTERM", 5.0, error="SIGTERM"))
    assert told == [ev.Withdraw("SIGTERM"), ev.SignalRanks((72, 73), signal.SIGTERM)]
    _, told = drive(elastic(), ev.StopRequested("the job goes on without this node", 5.0, others_go_on=True))
    assert told[0] == ev.Withdraw("the job goes on without this node")
    _, told = drive(elastic(), ev.StopRequested("cancelled", 5.0))
    assert told == [ev.Abort("cancelled"), ev.SignalRanks((72, 73), signal.SIGTERM)], "it ends everywhere"


def test_a_suspended_engine_is_told_at_once_and_once():
    lost = ev.Suspended(1, 4, "host 4 hung up")
    assert reports(elastic(), lost, lost, ev.Suspended(1, -1, "rank 2 is gone"), ev.Suspended(1, 0, "too")) == 2
    job = drive(elastic(), lost, ev.Suspended(1, 0, "too"))[0]
    assert (job.suspended, job.lost_hosts, job.phase) == ("host 4 hung up", (0, 4), Phase.RUNNING)
    assert drive(elastic(), ev.Suspended(0, 4, "of an older generation"))[0] == elastic()
    early = drive(job, ev.Suspended(2, 1, "of the next one", "c"))[0]
    assert (early.entered, early.suspended, early.lost_nodes) == (2, "of the next one", ("c",))
    mute = drive(elastic(), ev.Suspended(1, 4, "x", "e", ("e", "b"), 17))[0]
    assert (mute.accused, mute.passes) == (("b", "e"), 17)
    mute = drive(mute, ev.Regrouped(2, (0, 1), (2, 3), ("a:1", "b:2")))[0]
    assert (mute.accused, mute.passes) == ((), 17)


def test_the_next_generation_renumbers_who_stays():
    job = drive(elastic(), ev.Suspended(1, 4, "x"), ev.RankLost(2, "", 0.0), exited(2, -9, 9))[0]
    begin = ev.Regrouped(2, (1,), (3,), ("a:1", "b:2"))
    assert reports(job, begin, begin) == 1
    job, told = drive(job, begin)
    assert told == [ev.RegroupEngine()] and (job.suspended, job.lost_hosts, job.generation) == ("", (), 2)
    assert [(rank.rank, rank.member, rank.pid) for rank in job.ranks] == [(1, 3, 73)]
    assert [(rank.member, rank.phase) for rank in job.gone] == [(2, RankPhase.EXITED)] and job.peers == ("a:1", "b:2")
    assert drive(job, ev.Regrouped(2, (0,), (3,), ()), ev.PeersKnown(("a:1", "b:2"))) == (job, [])
    job, told = drive(job, exited(3, -9, 9))
    assert not told and job.ranks[0].signal == 9, "events name members"


def test_who_is_out_and_alive_is_ended():
    job, told = drive(elastic(), ev.Regrouped(2, (0,), (2,), ()))
    assert told == [ev.SignalRanks((73,), signal.SIGKILL), ev.RegroupEngine()]
    job, told = drive(job, exited(3, -9, 9))
    assert not told and not job.error and job.gone[0].phase is RankPhase.EXITED
    job, told = drive(elastic(), ev.Regrouped(2, (0,), (2,), ()), exited(3, 1))
    assert ev.Abort not in map(type, told), "how it ends is of no interest any more"
    _, told = drive(elastic(), ev.Regrouped(2, (0,), (2,), ()), ev.StopRequested("cancelled", 1.0))
    assert ev.SignalRanks((72, 73), signal.SIGTERM) in told, "nor is it forgotten"


def test_a_rank_that_lost_its_engine_may_end_by_itself():
    job, told = drive(elastic(), ev.RankLost(2, "hang-up", 0.0), now=10.0)
    assert not told and job.deadline == 10.0 + membership.LOST_S
    assert reports(elastic(), ev.RankLost(2, "hang-up", 0.0)) == 1
    after, told = drive(job, ev.TimerFired(), now=job.deadline)
    assert told == [ev.SignalRanks((72,), signal.SIGKILL)] and after.deadline is None
    assert "5 s after the others had lost it" in membership.ended_here(after, 2)
    after, told = drive(job, exited(2), ev.TimerFired(), now=job.deadline)
    assert not told and after.deadline is None
    assert drive(elastic(), ev.RankLeft(2, 0.0))[0].ranks[0].left and reports(elastic(), ev.RankLeft(2, 0.0)) == 1
    job = s.new_job("b", (2, 3), adopt=False, grace_s=7.0)
    job = drive(job, READY, ev.RankStarted(2, 72), ev.RankStarted(3, 73))[0]
    assert reports(job, ev.RankLeft(2, 0.0), ev.RankLost(2, "", 0.0)) == 0, "without elastic nothing is told"


# ---- newcomers and planned changes


def plan(generation, members, *, joining=(), planned=True, hold=False):
    return ev.Regrouped(generation, tuple(range(len(members))), tuple(members), (), tuple(joining), planned, hold)


def with_newcomer():
    """Members 2 and 3 go on, 7 prepares to join, all on this node."""
    return drive(elastic(), plan(1, (2, 3), joining=(7,)), ev.RankStarted(7, 77))[0]


def alone():
    """Members 7 and 8 prepare to join a job that goes on elsewhere."""
    job = s.new_job("c", (), joining=(7, 8), adopt=False, grace_s=7.0, elastic=True, generation=4)
    return drive(job, READY, ev.RankStarted(7, 77), ev.RankStarted(8, 78))[0]


def numbers(group):
    return [rank.member for rank in group]


def test_newcomers_are_started_once():
    asked = plan(1, (2, 3), joining=(7,), planned=False)
    job, told = drive(elastic(), asked, asked)
    assert told == [ev.StartNewcomers((7,))] and numbers(job.lobby) == [7] and numbers(job.ranks) == [2, 3]
    job, told = drive(job, ev.RankStarted(7, 77), exited(7, 1), asked)
    assert not told and job.phase is Phase.RUNNING and not job.error and job.lobby[0].exit_code == 1
    job, told = drive(job, plan(1, (2, 3), joining=()))
    assert not told and not job.lobby and numbers(job.gone) == [7]
    job, told = drive(job, asked)
    assert not told and job.lobby[0].exit_code == 1 and not job.gone, "one that has ended stays so"


def test_a_planned_generation_is_told_at_once_and_entered_later():
    job = drive(with_newcomer(), ev.ReadyToJoin(7))[0]
    assert job.lobby[0].ready and not drive(job, ev.ReadyToJoin(2))[0].ranks[0].ready
    assert reports(with_newcomer(), ev.ReadyToJoin(7), ev.ReadyToJoin(7)) == 1
    job, told = drive(job, plan(2, (2, 3, 7)))
    assert told == [ev.RegroupEngine()] and (job.generation, job.entered) == (2, 1)
    assert numbers(job.ranks) == [2, 3, 7] and job.ranks[2].newcomer and not job.lobby
    assert reports(job, ev.Entered(2, (0, 2, 3, 7)), ev.Entered(2, (0, 2, 3, 7))) == 1
    job, told = drive(job, ev.Entered(2, (0, 2, 3, 7), passes=9))
    assert not told and job.entered == 2 and job.passes == 9
    assert not any(rank.outside or rank.ready for rank in job.ranks)
    failed, told = drive(job, exited(7, 1))
    assert not told and failed.phase is Phase.RUNNING, "it may still find that it can't join"
    job, told = drive(job, ev.TakesNewcomers(7), exited(7, 1))
    assert ev.Abort in map(type, told), "from now on it is one of them"


@pytest.mark.parametrize("entered_first", [True, False])
def test_a_newcomer_that_has_entered_can_not_go_back(entered_first):
    """Newcomers are the first to enter a planned generation; a loss elsewhere takes it back."""
    job = drive(alone(), ev.ReadyToJoin(7), ev.ReadyToJoin(8), plan(5, (7, 8)))[0]
    back, into = plan(6, (), joining=(7, 8), planned=False), ev.Entered(5, (1, 7, 8))
    job, told = drive(job, *((into, back) if entered_first else (back, into)))
    assert ev.SignalRanks((77, 78), signal.SIGKILL) in told and numbers(job.lobby) == [7, 8]
    assert membership.ended_here(job, 7) == SPENT
    job, told = drive(job, exited(7, -9, 9), exited(8, -9, 9))
    assert not told and job.phase is Phase.RUNNING and all(rank.phase is RankPhase.EXITED for rank in job.lobby)


def test_who_is_dismissed_ends_by_itself():
    job, told = drive(elastic(), plan(2, (2,)))
    assert told == [ev.RegroupEngine()] and numbers(job.leaving) == [3] and job.deadline is None
    job, told = drive(job, ev.Entered(2, (0, 2)), now=10.0)
    assert not told and job.deadline == 10.0 + membership.LEAVE_S
    well, told = drive(job, ev.RankLeft(3, 0.0), exited(3, 0))
    assert not told and well.phase is Phase.RUNNING and well.leaving[0].phase is RankPhase.EXITED
    late, told = drive(job, ev.TimerFired(), now=10.0 + membership.LEAVE_S)
    assert told == [ev.SignalRanks((73,), signal.SIGKILL)] and late.deadline is None
    assert "60 s after a planned change had dismissed it, so its daemon" in membership.ended_here(late, 3)
    assert membership.ended_here(job, 3) == membership.ended_here(late, 2) == "", "nobody here has killed these"
    late, told = drive(late, exited(3, -9, 9))
    assert not told and late.phase is Phase.RUNNING and not late.error


MEMBERS = st.sampled_from([2, 3, 7, 8, 9])
GROUP = st.lists(st.sampled_from([7, 8, 9]), unique=True, max_size=2)
STAY = st.lists(st.sampled_from([2, 3, 7, 8]), unique=True)
ELASTIC_EVENTS = st.one_of(
    st.just(READY),
    st.builds(lambda member: ev.RankStarted(member, 70 + member), MEMBERS),
    st.builds(ev.SpawnFailed, MEMBERS, st.just("spawn")),
    st.builds(ev.RankConnected, MEMBERS),
    st.builds(ev.RankLeft, MEMBERS, st.just(1.0)),
    st.builds(ev.RankLost, MEMBERS, st.just("lost"), st.just(1.0)),
    st.builds(ev.RankTold, MEMBERS, st.just("told"), st.just(1.0), st.booleans()),
    st.builds(lambda member, end: exited(member, *end), MEMBERS, st.sampled_from([(0, 0), (1, 0), (-9, 9)])),
    st.builds(ev.EngineFailed, st.just("engine")),
    st.builds(ev.Suspended, st.integers(1, 5), st.integers(-1, 2), st.just("gone"), st.just("n")),
    st.tuples(st.integers(1, 6), STAY, GROUP, st.booleans()),
    st.builds(ev.Entered, st.integers(1, 6), st.lists(MEMBERS, unique=True).map(tuple)),
    st.builds(ev.ReadyToJoin, MEMBERS),
    st.builds(ev.TakesNewcomers, MEMBERS),
    st.builds(ev.StopRequested, st.just("stop"), st.floats(0, 10)),
    st.just(ev.TimerFired()),
    st.just(ev.EngineClosed()),
)


def word(job, number, members, joining, planned):
    """A word of the coordinator, as ``Job.follow`` lets it through: members of the generation are known here."""
    known = set(numbers(job.present))
    staying = [member for member in members if member in known]
    return plan(number, staying, joining=[member for member in joining if member not in staying], planned=planned)


MAY_CHANGE = ("rank", "lost", "connected", "newcomer", "outside", "ready", "ends_by")


@settings(deadline=None)
@given(st.booleans(), st.lists(st.tuples(ELASTIC_EVENTS, st.floats(0, 5)), max_size=40))
def test_whatever_happens_to_an_elastic_job(beside, steps):
    """Nobody is forgotten nor in two groups, an end is final, generations go forward, each newcomer is started once,
    and whoever may not stay has been told, or has a time."""
    job, now, started = elastic() if beside else alone(), 0.0, []
    for event, passed in steps:
        now += passed
        if isinstance(event, tuple):
            event = word(job, *event)
        before = job
        job, told = transitions.step(job, event, now)
        started += [member for one in told if isinstance(one, ev.StartNewcomers) for member in one.members]
        everybody = numbers(job.everybody)
        assert len(set(everybody)) == len(everybody) and set(everybody) >= set(numbers(before.everybody))
        assert job.generation >= before.generation and job.entered >= before.entered
        for old in before.everybody:
            if old.phase is RankPhase.EXITED:
                kept = {name: getattr(old, name) for name in MAY_CHANGE}
                assert replace(job.find(old.member), **kept) == old
        if before.visible != job.visible:
            assert isinstance(told[-1], ev.Report)
        if job.phase is Phase.RUNNING:
            assert all(_told(rank, told, before) for rank in job.gone)
            for rank in job.alive:
                if rank.ends_by is not None and rank.ends_by < math.inf:
                    assert job.deadline is not None and job.deadline <= rank.ends_by
    assert len(set(started)) == len(started)
    job, _ = transitions.step(job, ev.StopRequested("stop", 1.0), now)
    for _ in range(3):
        now += 60.0
        job, _ = transitions.step(job, ev.TimerFired(), now)
    assert transitions.step(job, ev.EngineClosed(), now)[0].phase is Phase.STOPPED


def _told(rank, told, before):
    """True if nothing of a rank that is out is left, or it has been killed, now or before."""
    if rank.phase is not RankPhase.RUNNING or rank.member in numbers(before.gone):
        return True
    return any(isinstance(one, ev.SignalRanks) and rank.pid in one.pids for one in told)


def _ended(**fields):
    return common_pb2.RankStatus(state=common_pb2.RANK_STATE_EXITED, **fields)


def test_a_daemon_that_was_started_again_finds_its_ranks():
    """One runs, one ended before and the journal knows how, one is nowhere: it was killed with the node."""
    fresh = s.new_job("b", (0, 1, 2), (2, 3, 5), adopt=False, grace_s=7.0, elastic=True, generation=4)
    before = {3: _ended(pid=73, exit_code=-9, signal=9, error_tail="x")}
    beside = s.Beside(fresh=[2], lobby=[9, 10], leaving=[1], takes_newcomers=True)
    before[10] = _ended(pid=80, exit_code=1, error_tail="ValueError")
    job = s.resumed(fresh, {2: 72, 9: 99, 1: 71}, before, beside, leave_by=60.0)
    assert [(rank.rank, rank.member, rank.pid, rank.signal) for rank in job.ranks] == [
        (0, 2, 72, 0),
        (1, 3, 73, 9),
        (2, 5, 0, 9),
    ]
    assert job.ranks[0].newcomer and job.takes_newcomers and (job.generation, job.entered) == (4, 4)
    job, told = drive(job, ev.EngineReady("h:1"))
    assert told == [ev.SpawnRanks()] and job.phase is Phase.RUNNING, "and nobody waits to be started"
    assert "was killed and started again" in job.suspended
    again = s.resumed(fresh, {2: 72, 1: 71}, before, beside, leave_by=60.0, replaced=True)
    assert "was replaced by the one that is installed now" in again.suspended, "an upgrade, or a reload"
    assert [rank.pid for rank in job.alive] == [72, 71]
    assert [(rank.member, rank.exit_code, rank.newcomer) for rank in job.lobby] == [(9, -9, True), (10, 1, True)]
    assert job.lobby[0].error_tail.startswith("Its daemon was started again")
    assert job.lobby[1].error_tail == "ValueError"
    assert job.deadline == 60.0, "who was dismissed has so long to end"
    job, told = drive(job, ev.Regrouped(5, (0,), (2,), ("h:1", "i:2")), ev.Entered(5, (2, 8)))
    assert told == [ev.RegroupEngine()] and not job.suspended and job.entered == 5
