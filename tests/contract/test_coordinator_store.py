"""The coordinator's store: one suite for every database."""

import asyncio
from dataclasses import replace

import pytest
import sqlalchemy as sa
from rig.coordinator.desk import Desk, Time, at_work

from bagua.base.errors import ConflictError
from bagua.daemon.coordinator.rules.coordinator_leases import RESYNC_S
from bagua.daemon.coordinator.rules.decide import apply, decide
from bagua.daemon.coordinator.rules.domain import (
    Change,
    Event,
    JobRecord,
    JobState,
    LocalJob,
    LocalRank,
    NodeRecord,
    NodeView,
    Phase,
    RankRecord,
    RankState,
    reshaped,
)
from bagua.daemon.coordinator.rules.observe import observe
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.store import Store
from bagua.proto import common_pb2

OPTIONS = Options(lease_s=10, settle_s=1)


@pytest.fixture
def store(open_database):
    return Store(open_database())


def job(job_id="job-1", created_at=100.25, nnodes=2):
    spec = checked_spec(common_pb2.JobSpec(name="näme", entry="t.py", nnodes=nnodes, nproc_per_node=2))
    return JobRecord(
        job_id, spec, created_at, reason="submitted", submitted_clock=7.5, master_port=20_001, job_key=b"\0key\xff"
    )


def node(name, slots=2, boot_id="boot", owner="me"):
    return NodeRecord(name, f"host-{name}", "127.0.0.1", slots, "1.0", boot_id, 100.0, owner)


def view(record):
    return NodeView(record.node_id, record.hostname, record.address, record.boot_id, record.slots, 0, True, 0.0)


def stored(tx, job_id="job-1"):
    return tx.stored([job_id])[0]


def change(old, events=(), **more):
    return Change(old, replace(old.job, **more), events, old.owner)


def placement(old, nodes):
    decision = decide(old.job, {record.node_id: view(record) for record in nodes}, 101.0, OPTIONS)
    new, events = apply(old.job, decision, 101.0, 1e9)
    return Change(old, new, events, old.owner)


def placed(store, job_id="job-1"):
    with store.transaction() as tx:
        for name in ("a", "b"):
            if tx.node(name) is None:
                tx.put_nodes([node(name)])
        tx.create_job(job(job_id), None, "me")
        step = placement(stored(tx, job_id), [node("a"), node("b")])
        assert not tx.save([step])
        return step.job


# ---- jobs


def test_every_field_of_hosts_and_ranks_is_kept(store):
    old = placed(store)
    with store.read() as tx:
        assert tx.job("job-1") == old
    rank = RankRecord(
        1, 1, "a", RankState.EXITED, 2**31 - 1, -9, 9, "tail ☃ \n", "/log", 102.125, 102.25, True, member=7, left=True
    )
    more = {"phase": Phase.STOPPED, "engine_address": "[::1]:5", "error": "broken"}
    more |= {"waiting": "waits for b", "suspended": "lost", "suspended_clock": 102.75, "lost_hosts": ("b", "c")}
    more["accused"] = ("c",)
    more["withdrawn"] = True
    host = replace(old.hosts[0], **more, error_clock=102.5, ranks=(old.ranks[0], rank))
    with store.transaction() as tx:
        step = change(
            stored(tx),
            hosts=(host, old.hosts[1]),
            state=JobState.STOPPING,
            outcome=JobState.FAILED,
            cancel_reason="cancelled",
            reason="why",
            started_at=1.5,
            finished_at=3.5,
            placed_clock=4.5,
            stopping_clock=2.5,
            stalls=3,
            passes=2**40,
            stalled_passes=2**39,
            accusations=(("a", "b"), ("b", "c")),
            put_out=(("c", "boot", 104.5),),
            patience_s=160.0,
        )
        assert not tx.save([step])
    with store.read() as tx:
        assert tx.job("job-1") == step.job and stored(tx) == step.stored


def test_a_generation_replaces_the_hosts_and_keeps_former_parts(store):
    old = placed(store)
    ranks = tuple(replace(rank, state=RankState.RUNNING, member=rank.rank) for rank in old.ranks)
    a = replace(old.hosts[0], phase=Phase.STARTED, nranks=1, ranks=ranks[:1])
    lost = RankRecord(1, 0, "a", RankState.EXITED, 7, -9, 9, member=1)
    dead = replace(old.hosts[0], index=-1, first_rank=1, nranks=1, phase=Phase.STOPPED, ranks=(lost,))
    away = replace(old.hosts[1], index=-2, phase=Phase.STARTED, last_generation=1, ranks=ranks[2:])
    with store.transaction() as tx:
        step = change(stored(tx), generation=2, hosts=(a,), former=(dead, away))
        assert reshaped(step.old.job, step.job) and not step.placed and not tx.save([step])
    with store.read() as tx:
        assert stored(tx) == step.stored
        assert tx.used_slots() == {"a": 1, "b": 2}, "who is away may run it still"
    with store.transaction() as tx:
        ended = change(stored(tx), former=(dead, replace(away, phase=Phase.STOPPED)))
        assert not tx.save([ended])
        assert stored(tx) == ended.stored and tx.used_slots() == {"a": 1}


def test_of_many_changes_those_that_come_too_late_are_told_and_not_written(store):
    names = [f"job-{number}" for number in range(5)]
    with store.transaction() as tx:
        for name in names:
            tx.create_job(job(name), None, "me")
    with store.transaction() as tx:
        late = [change(stored(tx, name), reason="late") for name in names]
        assert not tx.save([change(stored(tx, names[1]), reason="first")])
    with store.transaction() as tx:
        assert tx.save(late) == {names[1]}
        assert tx.save(late[:1]) == {names[0]}
    with store.read() as tx:
        reasons = {found.job.job_id: found.job.reason for found in tx.stored(names)}
        assert reasons == {name: "first" if name == names[1] else "late" for name in names}
        assert stored(tx, names[0]) == late[0].stored


def test_events_are_numbered_within_their_job(store):
    with store.transaction() as tx:
        tx.create_job(job("job-1"), None, "me", [Event("a", "x", 0, 1.0)])
        tx.create_job(job("job-2"), None, "me", [Event("a", "x", 0, 1.0), Event("b", "y", 0, 2.0)])
        more = (Event("b", "y", 0, 2.0), Event("c", "z", 1, 3.0))
        tx.save([change(stored(tx, "job-1"), more), change(stored(tx, "job-2"), (Event("c", "z", 0, 4.0),))])
        assert tx.events("job-1", 1, 10) == [Event("b", "y", 0, 2.0, 2), Event("c", "z", 1, 3.0, 3)]
        assert [event.kind for event in tx.events("job-1", 0, 1)] == ["a"]
        assert [event.seq for event in tx.events("job-2", 0, 10)] == [1, 2, 3]


def test_a_fact_of_one_host_writes_one_row_of_hosts(open_database):
    """However many hosts and ranks the job has, and however many jobs wait."""
    engine = open_database()
    store = Store(engine)
    records = [node(f"n{number:02}", 8) for number in range(40)]
    with store.transaction() as tx:
        for record in records:
            tx.put_nodes([record])
        tx.create_job(
            replace(job(), spec=checked_spec(common_pb2.JobSpec(entry="t", nnodes=40, nproc_per_node=8))), None, "me"
        )
        step = placement(stored(tx), records)
        tx.save([step])
    written = []

    def count(conn, cursor, statement, parameters, context, executemany):
        if not statement.startswith(("BEGIN", "COMMIT", "SELECT")):
            written.append(len(parameters) if executemany else 1)

    fact = LocalJob("job-1", 1, Phase.STARTED, ranks=tuple(LocalRank(rank, RankState.RUNNING, 7) for rank in range(8)))
    new, events = observe(step.job, "n00", "boot", fact, 102.0, 1e9)
    sa.event.listen(engine, "after_cursor_execute", count)
    with store.transaction() as tx:
        assert not tx.save([Change(step.stored, new, events, "me")])
    assert sum(written) <= 2 + len(events)  # the job, the host, and what happened
    with store.read() as tx:
        assert tx.job("job-1") == new


def test_old_jobs_are_found_oldest_first_and_go_with_all_that_is_theirs(store):
    with store.transaction() as tx:
        for number in range(6):
            tx.create_job(job(f"job-{number}"), None, "me", [Event("a", "x", 0, 1.0)])
            if number:
                ended = change(stored(tx, f"job-{number}"), state=JobState.FAILED, finished_at=1_000.0 - number)
                tx.save([ended])
        assert tx.expired(0.0, 3, 10) == ["job-5", "job-4"]
        assert tx.expired(997.5, 5, 10) == ["job-5", "job-4", "job-3"]
        assert tx.expired(2_000.0, 0, 2) == ["job-5", "job-4"]
        tx.delete_jobs(["job-5", "job-4"])
        assert tx.expired(2_000.0, 0, 10) == ["job-3", "job-2", "job-1"]
        assert tx.events("job-5", 0, 10) == [] and len(tx.events("job-3", 0, 10)) == 1


def test_jobs_are_given_back_at_a_stop(store):
    with store.transaction() as tx:
        tx.create_job(job("job-1"), None, "x")
        tx.create_job(job("job-2"), None, "y")
        assert tx.release_jobs("x") == 1
        assert {found.job.job_id: found.owner for found in tx.stored(["job-1", "job-2"])} == {
            "job-1": None,
            "job-2": "y",
        }
        assert stored(tx).revision == 2  # so others see it


# ---- nodes


def test_a_session_that_ended_does_not_end_one_with_another_coordinator(store):
    with store.transaction() as tx:
        tx.put_nodes([node("mine"), node("theirs", owner="they")])
        tx.disconnect_nodes(["theirs"], "me", 105.0)
        assert tx.node("theirs").owner == "they"
        tx.disconnect_nodes(["theirs"], "they", 106.0)
        assert (tx.node("theirs").owner, tx.node("theirs").last_seen) == (None, 106.0)
        assert len(tx.disconnect_all("me")) == 1


def test_slots_are_taken_until_the_node_says_stopped_or_its_daemon_is_another(store):
    first = placed(store)

    def used():
        with store.read() as tx:
            return tx.used_slots()

    assert used() == {"a": 2, "b": 2}
    hosts = (replace(first.hosts[0], phase=Phase.STOPPED), first.hosts[1])
    with store.transaction() as tx:
        tx.save([change(stored(tx), state=JobState.FAILED, hosts=hosts)])
        assert list(tx.live()) == ["job-1"]  # something may be left on b
    assert used() == {"b": 2}
    with store.transaction() as tx:
        tx.put_nodes([node("b", boot_id="restarted")])
    assert used() == {}


def test_a_placement_that_does_not_fit_beside_others_is_stale(store):
    with store.transaction() as tx:
        for name in ("a", "b"):
            tx.put_nodes([node(name)])
        for name in ("job-1", "job-2"):
            tx.create_job(job(name), None, "me")
        steps = [placement(stored(tx, name), [node("a"), node("b")]) for name in ("job-1", "job-2")]
        assert tx.save(steps, tx.lock_nodes(["a", "b"])) == {"job-2"}
        late = placement(stored(tx, "job-2"), [node("a", boot_id="older"), node("b")])
        assert tx.save([late], tx.lock_nodes(["a", "b"])) == {"job-2"}
    with store.read() as tx:
        assert tx.used_slots() == {"a": 2, "b": 2}


def test_slots_that_a_change_gives_back_it_may_take(store):
    """The last word of a lost part and the newcomers in its place are one change of the job."""
    started = placed(store)
    with store.transaction() as tx:
        b = started.hosts[1]
        former = replace(b, index=-1, phase=Phase.STOPPED)
        newcomers = replace(b, index=-2, phase=Phase.UNKNOWN, joining=True)
        assert newcomers.nranks == 2, "all slots of b"
        nodes = tx.lock_nodes(["a", "b"])
        grown = change(stored(tx), hosts=started.hosts[:1], joining=(newcomers,), former=(former,))
        assert not tx.save([grown], nodes)
        more = replace(newcomers, index=-3)
        assert tx.save([change(stored(tx), joining=(newcomers, more))], nodes) == {"job-1"}
        assert tx.used_slots() == {"a": 2, "b": 2}


@pytest.mark.parametrize("ends", [True, False], ids=["and ends", "and has been changed meanwhile"])
def test_slots_that_a_job_gives_back_another_takes_in_the_same_round(store, ends):
    """However the changes are ordered; and they stay taken if the end of the first is not written."""
    first = placed(store)
    with store.transaction() as tx:
        tx.create_job(job("job-2"), None, "me")
        nodes = tx.lock_nodes(["a", "b"])
        old = stored(tx)
        if not ends:
            assert not tx.save([change(old, reason="somebody else was here")], nodes)
        gone = tuple(replace(host, phase=Phase.STOPPED) for host in first.hosts)
        last = change(old, state=JobState.SUCCEEDED, hosts=gone)
        next_one = placement(stored(tx, "job-2"), [node("a"), node("b")])
        assert tx.save([next_one, last], nodes) == (set() if ends else {"job-1", "job-2"})
    with store.read() as tx:
        assert tx.used_slots() == {"a": 2, "b": 2}
        assert [tx.stored([name])[0].job.state for name in ("job-1", "job-2")] == (
            [JobState.SUCCEEDED, JobState.STARTING] if ends else [JobState.STARTING, JobState.PENDING]
        )


# ---- use cases


async def test_a_node_drains_until_somebody_says_otherwise(open_database):
    """Also when its daemon connects again, or is started again, and when the coordinator is."""
    engine = open_database()
    async with at_work(Desk(engine)) as desk:
        for boot_id in ("boot", "boot", "later"):
            desk.leave(await desk.connect("a", boot_id=boot_id))
            await desk.service.drain("a", True)
        await desk.connect("a", boot_id="latest")
        assert desk.board.views["a"].asked_to_drain
    async with at_work(Desk(engine)) as desk:
        session = await desk.connect("a", boot_id="latest")
        assert desk.board.views["a"].draining
        await desk.service.drain("a", False)
        assert not desk.board.views["a"].draining
        await desk.service.drain("a", True, this_run=True)
        desk.leave(session)
        await desk.connect("a", boot_id="latest")
        assert desk.board.views["a"].draining
    async with at_work(Desk(engine)) as desk:
        desk.leave(await desk.connect("a", boot_id="latest"))
        assert desk.board.views["a"].draining
        await desk.connect("a", boot_id="new")
        assert not desk.board.views["a"].draining


async def test_a_drain_that_another_coordinator_was_asked_for(open_database):
    time = Time()
    desks = [Desk(open_database(), name, time=time, shared=True) for name in ("one", "two")]
    async with at_work(desks[0]), at_work(desks[1]):
        await desks[0].connect("a")
        await desks[1].until(lambda: "a" in desks[1].board.views or desks[1].pass_time(RESYNC_S))
        await desks[1].service.drain("a", True)
        await desks[0].until(lambda: desks[0].board.views["a"].draining or desks[0].pass_time(RESYNC_S))
        await desks[1].service.drain("a", False)
        await desks[0].until(lambda: not desks[0].board.views["a"].draining or desks[0].pass_time(RESYNC_S))


async def test_two_coordinators_do_not_both_decide(open_database):
    """A job belongs to the one that took it in, until that one's beat stands still for a lease by the other's clock."""
    one = Desk(open_database(), "one", shared=True)
    two = Desk(open_database(), "two", shared=True)
    async with at_work(two):
        async with at_work(one):
            for name in ("a", "b"):
                await one.connect(name)
            job_id = (await one.service.submit(job().spec, "")).job_id
            await one.until(lambda: one.board.jobs[job_id].job.generation == 1)
            for _ in range(3):
                two.pass_time(1.5)
                await two.until(lambda: two.board.job(job_id) == one.board.job(job_id))
            assert two.counters["decisions", ""] == 0
            assert two.board.jobs[job_id].owner == "one"
            # One is killed: it gives nothing back.
            one.reconciler.stop = no_stop
        for _ in range(45):  # a question to the database lasts no longer than RESYNC_S: nobody seems to be cut off
            two.pass_time(0.4)
            await two.connect("c", slots=0)
        await two.until(lambda: two.board.jobs[job_id].owner == "two")
        await two.until(lambda: two.board.jobs[job_id].job.state is JobState.STOPPING)
        assert "has not been heard of for 10 s" in two.board.jobs[job_id].job.reason
        assert two.board.jobs[job_id].job.generation == 1


async def test_a_coordinator_that_stood_still_blames_no_node_when_its_clock_catches_up(open_database):
    one, two = (Desk(open_database(), owner, shared=True) for owner in ("one", "two"))
    async with at_work(one), at_work(two):
        session = await one.connect("a")
        two.time.monotonic += 500.0
        await two.connect("b", slots=0)  # what is written carries its clock
        one.pass_time(1.0)  # it looks at the database, however long that takes
        await one.until(lambda: one.clock.now() > 500.0)
        one.sessions.close_silent(one.clock.now(), OPTIONS.lease_s)
        assert not session.closed.is_set()


@pytest.mark.parametrize("newcomer", [False, True])
async def test_a_newcomer_gives_nobody_up_before_its_time(open_database, newcomer):
    """Daemons may know of no other coordinator than one that is dead, and count on its port. The same one, started
    again, is found there."""
    one = Desk(open_database(), "one", shared=True)
    async with at_work(one):
        await one.connect("a")
        job_id = (await one.service.submit(job(nnodes=1).spec, "")).job_id
        await one.until(lambda: one.board.jobs[job_id].job.generation == 1)
        one.reconciler.stop = no_stop
    two = Desk(open_database(), "two" if newcomer else "one", shared=True)
    gone_s, outage_s = two.options.gone_s(), two.options.outage_s
    assert 2 * gone_s < outage_s

    async def passes(seconds):
        for _ in range(10):
            two.pass_time(seconds / 10)
            await two.connect("b", slots=0)  # what is written follows what is decided
        found = await two.service.job(job_id)
        return found.state

    async with at_work(two):
        assert await passes(gone_s - 1.0) is JobState.STOPPING
        assert await passes(gone_s) is (JobState.STOPPING if newcomer else JobState.FAILED)
        assert await passes(outage_s - gone_s - 1.0) is (JobState.STOPPING if newcomer else JobState.FAILED)
        assert await passes(gone_s) is JobState.FAILED


async def no_stop():
    """A killed process says nothing."""


async def test_coordinators_that_race_never_oversubscribe(open_database):
    """Twelve jobs of two slots for two nodes with two each: two fit, whoever asks."""
    desks = [Desk(open_database(), f"c{number}", shared=True) for number in range(3)]
    async with at_work(desks[0]), at_work(desks[1]), at_work(desks[2]):
        for name in ("a", "b"):
            await desks[0].connect(name)
        for desk in desks[1:]:
            await see(desks, lambda desk=desk: len(desk.board.views) == 2)
        wire = common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=2, placement_timeout_s=1e6)
        calls = [desks[number % 3].service.submit(checked_spec(wire), "") for number in range(12)]
        submitted = await asyncio.gather(*calls)
        for desk in desks:
            await see(desks, lambda desk=desk: len(desk.board.jobs) == 12)
            await see(desks, lambda desk=desk: sum(view.used for view in desk.board.views.values()) == 4)
        found = [await desks[0].service.job(record.job_id) for record in submitted]
        assert [record.state for record in found].count(JobState.STARTING) == 2
        assert {record.generation for record in found} == {0, 1}


async def see(desks, done):
    """Lets the coordinators look at the database until ``done()``. Time goes on when all of them have done so: on a
    busy machine none takes another one for dead."""
    async with asyncio.timeout(60):
        while not done():
            before = [desk.counters["transactions", ""] for desk in desks]
            for desk in desks:
                desk.pass_time(1.0)
            while any(desk.counters["transactions", ""] == count for desk, count in zip(desks, before, strict=True)):
                await asyncio.sleep(0.005)


async def test_a_node_id_in_use_with_another_coordinator_is_refused(open_database):
    one, two = (Desk(open_database(), owner, shared=True) for owner in ("one", "two"))
    async with at_work(one):
        async with at_work(two):
            moving = await one.connect("a")
            await see([one, two], lambda: "a" in two.board.views and two.board.views["a"].connected)
            await two.connect("a")  # the same daemon moved over
            one.leave(moving)
            await see([one, two], lambda: one.board.views["a"].connected)
            with pytest.raises(ConflictError, match="in use by another daemon, on host-a"):
                await one.connect("a", boot_id="other")
            two.reconciler.stop = no_stop
        async with asyncio.timeout(60):
            while not await taken(one):
                one.pass_time(1.0)


async def taken(desk):
    """True if the coordinator lets another daemon have the id."""
    try:
        await desk.connect("a", boot_id="other")
    except ConflictError:
        return False
    return True
