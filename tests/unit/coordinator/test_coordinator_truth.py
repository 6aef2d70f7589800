"""The coordinator tells the truth whatever the database, the clocks and the nodes do: real store, real reconciler."""

import asyncio
import sqlite3
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest
import sqlalchemy as sa
from rig.coordinator.desk import Desk, Time, at_work

from bagua.base.errors import NotFoundError, UnavailableError
from bagua.daemon.coordinator.rounds.round_state import Stage
from bagua.daemon.coordinator.rules.decide import apply
from bagua.daemon.coordinator.rules.domain import JobState, LocalJob, LocalRank, Phase, RankState
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.proto import common_pb2

LEASE_S, FENCE_S, GONE_S = 10.0, 60.0, 63.0
OPTIONS = Options(lease_s=LEASE_S, settle_s=1, fence_s=FENCE_S)


def spec(nproc=1, timeout=1_800.0):
    return checked_spec(
        common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=nproc, placement_timeout_s=timeout, stop_grace_s=1)
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "bagua.db"


def desk_on(path, patience_ms=50, **more):
    """A coordinator that waits so long for a locked database."""
    engine = open_engine(sqlite_url(path))
    engine.dispose()

    @sa.event.listens_for(engine, "connect")
    def configure(connection, _):
        connection.execute(f"PRAGMA busy_timeout={patience_ms}")

    return Desk(engine, options=OPTIONS, **more)


@contextmanager
def locked(path):
    """Somebody else has the write lock of the database."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def owner_of(path, node_id):
    with closing(sqlite3.connect(path)) as database:
        found = database.execute("SELECT owner FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
        return None if found is None else found[0]


def fact(job_id, state, phase=Phase.STARTED, nproc=1):
    return LocalJob(job_id, 1, phase, ranks=tuple(LocalRank(rank, state, 7) for rank in range(nproc)))


async def running(desk, session):
    """A job that runs on the node."""
    job_id = (await desk.service.submit(spec(), "")).job_id
    await desk.until(lambda: state_of(desk, job_id) is JobState.STARTING)
    desk.intake.fact(session, fact(job_id, RankState.RUNNING))
    await desk.until(lambda: state_of(desk, job_id) is JobState.RUNNING)
    return job_id


def state_of(desk, job_id):
    job = desk.board.job(job_id)
    return None if job is None else job.state


def errors(desk):
    return desk.counters["reconcile_errors", ""]


# ---- the database is away


async def test_the_job_that_ended_last_is_told_from_memory_as_long_as_it_is_stored(path):
    async with at_work(desk_on(path)) as desk:
        session = await desk.connect("a")
        job_id = await running(desk, session)
        desk.intake.fact(session, fact(job_id, RankState.EXITED, Phase.STOPPED))
        await desk.until(lambda: job_id not in desk.board.jobs)
        shown = await desk.service.job(job_id)
        assert shown is desk.board.last_ended.job
        with desk.store.read() as tx:
            assert tx.job(job_id) == shown
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("UPDATE jobs SET revision = revision + 1, reason = 'changed' WHERE job_id = ?", (job_id,))
        assert (await desk.service.job(job_id)).reason == "changed"
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("DELETE FROM jobs WHERE job_id = ?", (job_id,))
        with pytest.raises(NotFoundError):
            await desk.service.job(job_id)


async def test_callers_get_the_error_and_what_failed_did_not_happen(path):
    async with at_work(desk_on(path)) as desk:
        session = await desk.connect("a")
        job_id = await running(desk, session)
        with locked(path):
            with pytest.raises(UnavailableError, match="is locked by another program"):
                await desk.service.submit(spec(), "")
            with pytest.raises(UnavailableError, match="is locked by another program"):
                await desk.service.cancel(job_id, "")
            assert (await desk.service.job(job_id)).cancel_reason is None  # reading goes on
        assert [job.job_id for job in (await desk.service.jobs([], 0, ""))[0]] == [job_id]
        assert (await desk.service.cancel(job_id, "")).cancel_reason == "cancelled"


async def test_an_introduction_that_is_cancelled_while_it_waits_leaves_no_ghost(path):
    async with at_work(desk_on(path, patience_ms=4_000)) as desk:
        with locked(path):
            task = asyncio.create_task(desk.connect("a"))
            await desk.until(lambda: desk.sessions.get("a") is not None and not desk.intake.inbox)
            await asyncio.sleep(0.05)  # the writer waits for the lock now
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await desk.connect("b")  # a round later
        assert owner_of(path, "a") is None
        assert [(node.node_id, node.connected) for node in desk.service.nodes() if node.connected] == [("b", True)]
        job = await desk.service.submit(spec(nproc=2), "")
        await desk.until(lambda: state_of(desk, job.job_id) is JobState.STARTING)
        assert desk.board.jobs[job.job_id].job.hosts[0].node_id == "b"


# ---- calls of users go on


async def test_facts_that_come_together_leave_turns_for_others(path, monkeypatch):
    """A user's call needs several turns of the event loop, and waits in each for what runs before it."""
    observed, most = 0, 0
    observe = Stage.observe

    def counted(*arguments):
        nonlocal observed
        observed += 1
        return observe(*arguments)

    monkeypatch.setattr(Stage, "observe", counted)
    async with at_work(desk_on(path)) as desk:
        session = await desk.connect("a")
        for number in range(100):
            desk.intake.fact(session, LocalJob(f"job{number}", 1, Phase.STARTED))
        while observed < 100:
            before = observed
            await asyncio.sleep(0)
            most = max(most, observed - before)
    assert most <= 8


# ---- faults of the coordinator itself


async def test_a_fact_that_raises_ends_its_job_and_holds_up_no_other(path):
    async with at_work(desk_on(path)) as desk:
        session = await desk.connect("a")
        job_id, other = await running(desk, session), await running(desk, session)
        bad = LocalJob(job_id, 1, Phase.STARTED, ranks=(LocalRank(0, None, 7),))
        desk.intake.fact(session, bad)
        desk.intake.fact(session, fact(other, RankState.EXITED, Phase.STOPPED))
        await desk.until(lambda: other not in desk.board.jobs)
        assert (await desk.service.job(other)).state is JobState.SUCCEEDED
        await desk.until(lambda: state_of(desk, job_id) is JobState.STOPPING)
        assert "the coordinator failed at this job: TypeError in 'observe'" in desk.board.jobs[job_id].job.reason
        assert desk.counters["faults", "observe"] == 1 and not errors(desk)
        desk.intake.fact(session, replace(bad, phase=Phase.STOPPED))  # its last word raises, too
        await desk.until(lambda: job_id not in desk.board.jobs)
        assert (await desk.service.job(job_id)).state is JobState.FAILED
        assert desk.service.nodes()[0].used == 0


async def test_a_job_that_can_not_even_be_ended_holds_up_no_other(path, monkeypatch):
    def broken(job, *rest):
        if job.spec.master_port == -1:
            raise ValueError("broken")
        return apply(job, *rest)

    async with at_work(desk_on(path)) as desk:
        await desk.connect("a")
        first = await desk.service.submit(replace(spec(), master_port=-1), "")
        monkeypatch.setattr("bagua.daemon.coordinator.rounds.round_state.apply", broken)
        second = await desk.service.submit(spec(), "")
        await desk.until(lambda: state_of(desk, second.job_id) is JobState.STARTING)
        assert first.job_id in desk.board.jobs


async def test_a_change_that_can_not_be_written_holds_up_no_other(path):
    async with at_work(desk_on(path)) as desk:
        session = await desk.connect("a")
        job_id, other = await running(desk, session), await running(desk, session)
        bad = LocalJob(job_id, 1, Phase.STARTED, ranks=(LocalRank(0, RankState.RUNNING, object()),))
        desk.intake.fact(session, bad)
        desk.intake.fact(session, fact(other, RankState.EXITED, Phase.STOPPED))
        await desk.until(lambda: other not in desk.board.jobs)
        assert state_of(desk, job_id) is JobState.RUNNING and desk.counters["faults", "write"] == 1
        desk.intake.fact(session, fact(job_id, RankState.EXITED, Phase.STOPPED))
        await desk.until(lambda: job_id not in desk.board.jobs)


# ---- clocks


async def test_what_a_job_has_waited_adds_up_over_restarts(path):
    """Time in which no coordinator ran does not count, however the wall clock was set."""
    async with at_work(desk_on(path)) as first:
        job_id = (await first.service.submit(spec(timeout=100.0), "")).job_id
        first.pass_time(60.0)
        await first.connect("a", slots=0)  # what is written keeps the clock
    time = Time()
    time.wall = 5e9
    async with at_work(desk_on(path, time=time)) as second:
        second.pass_time(30.0)
        await second.connect("a", slots=0)
        assert state_of(second, job_id) is JobState.PENDING
        second.pass_time(11.0)
        await second.until(lambda: state_of(second, job_id) is None)
        assert "waited 100 s" in (await second.service.job(job_id)).reason


# ---- what a step costs


@pytest.mark.parametrize("kind", ["waiting", "hosts"])
async def test_what_is_written_does_not_grow_with_what_is_there(path, kind):
    """Rows that one trivial job writes: beside few and beside many jobs that wait, few and many nodes."""
    async with at_work(desk_on(path, patience_ms=20_000)) as desk:
        session = await desk.connect("a")
        few = await rows_of_one_job(desk, session)
        if kind == "waiting":
            await asyncio.gather(*(desk.service.submit(spec(nproc=9), "") for _ in range(300)))
        else:
            await asyncio.gather(*(desk.connect(f"n{number}", slots=0) for number in range(300)))
        await desk.until(lambda: all(found.job.reason != "submitted" for found in desk.board.jobs.values()))
        assert await rows_of_one_job(desk, session) <= few + 4  # rounds may be cut differently


async def rows_of_one_job(desk, session):
    rows = [0]

    def count(conn, cursor, statement, parameters, context, executemany):
        if statement.startswith(("INSERT", "UPDATE", "DELETE")) and "coordinators" not in statement:
            rows[0] += len(parameters) if executemany else 1

    engine = desk.store._engine
    sa.event.listen(engine, "after_cursor_execute", count)
    job_id = await running(desk, session)
    desk.intake.fact(session, fact(job_id, RankState.EXITED))
    await desk.until(lambda: state_of(desk, job_id) is JobState.STOPPING)
    desk.intake.fact(session, fact(job_id, RankState.EXITED, Phase.STOPPED))
    await desk.until(lambda: job_id not in desk.board.jobs)
    sa.event.remove(engine, "after_cursor_execute", count)
    return rows[0]
