"""The life of a job on a node, without processes."""

import signal
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bagua.daemon.node.rules import events as ev
from bagua.daemon.node.rules import state as s
from bagua.daemon.node.rules import transitions
from bagua.daemon.node.rules.state import Phase, RankPhase

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
    """The others fail by its word, and may end before its own process does."""
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
