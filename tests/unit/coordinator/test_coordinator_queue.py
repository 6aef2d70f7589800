"""Jobs that wait for nodes: the oldest gets its nodes in the end, whatever comes after it."""

import pytest
from rig.coordinator.desk import Desk, at_work

from bagua.base.errors import UnavailableError
from bagua.daemon.coordinator.rules.domain import JobState, LocalJob, LocalRank, Phase, RankState
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.daemon.coordinator.store.worker import Worker
from bagua.proto import common_pb2

OPTIONS = Options(lease_s=10_000, keep_after_s=10)
PATIENCE_S = 1_000.0


def spec(nnodes, nproc):
    patience_s = PATIENCE_S if nnodes > 1 else 2 * PATIENCE_S
    wanted = common_pb2.JobSpec(entry="t.py", nnodes=nnodes, nproc_per_node=nproc, placement_timeout_s=patience_s)
    return checked_spec(wanted)


class Queue:
    """Two nodes, on each of which a small job runs, and a large job that waits for both."""

    def __init__(self, desk):
        self.desk = desk
        self.sessions = {}

    async def submit(self, nnodes, nproc):
        return (await self.desk.service.submit(spec(nnodes, nproc), "")).job_id

    def state(self, job_id):
        job = self.desk.board.job(job_id)
        return None if job is None else job.state

    async def placed(self, job_id):
        await self.desk.until(lambda: self.state(job_id) is JobState.STARTING)

    async def end(self, job_id):
        job = self.desk.board.job(job_id)
        assert job is not None
        for host in job.hosts:
            ranks = tuple(LocalRank(rank.rank, RankState.EXITED, 7) for rank in host.ranks)
            self.desk.intake.fact(self.sessions[host.node_id], LocalJob(job_id, 1, Phase.STOPPED, ranks=ranks))
        await self.desk.until(lambda: self.state(job_id) is None)


async def begin(desk):
    queue = Queue(desk)
    queue.sessions = {name: await desk.connect(name) for name in ("a", "b")}
    slots = desk.board.views["a"].slots
    small = [await queue.submit(1, slots // 2) for _ in "ab"]
    for one in small:
        await queue.placed(one)
    return queue, small, await queue.submit(2, slots)


@pytest.mark.parametrize("end", ["placed", "cancelled", "too late"])
async def test_small_jobs_that_keep_coming_starve_no_large_one(tmp_path, end):
    async with at_work(Desk(open_engine(sqlite_url(tmp_path / "bagua.db")), options=OPTIONS)) as desk:
        queue, small, large = await begin(desk)
        early = await queue.submit(1, 1)
        await queue.placed(early)  # nobody has waited long
        desk.pass_time(OPTIONS.keep_after_s)
        late = await queue.submit(1, 1)
        await queue.end(small[0])
        await queue.end(early)
        assert queue.state(late) is JobState.PENDING and queue.state(large) is JobState.PENDING
        assert f"nodes are kept for {large}" in (await desk.service.job(late)).reason
        if end != "placed":
            if end == "cancelled":
                await desk.service.cancel(large, "not needed")
            else:
                desk.pass_time(PATIENCE_S)
            await queue.placed(late)
            return
        await queue.end(small[1])
        await queue.placed(large)
        assert queue.state(late) is JobState.PENDING
        await queue.end(large)
        await queue.placed(late)


class Unsure(Worker):
    """The database refuses so many of the next transactions."""

    refuses = 0

    async def write_with(self, work):
        if self.refuses:
            self.refuses -= 1
            raise UnavailableError("the database does not answer")
        return await super().write_with(work)


@pytest.mark.parametrize("refuses", [0, 1])
async def test_nodes_that_are_kept_no_more_are_free_whatever_becomes_of_that_round(tmp_path, refuses):
    desk = Desk(open_engine(sqlite_url(tmp_path / "bagua.db")), options=OPTIONS, make_worker=Unsure)
    async with at_work(desk):
        queue, small, large = await begin(desk)
        desk.pass_time(OPTIONS.keep_after_s)
        late = await queue.submit(1, 1)
        await queue.end(small[0])
        assert queue.state(late) is JobState.PENDING
        assert isinstance(desk.worker, Unsure)
        desk.worker.refuses = refuses
        desk.leave(queue.sessions["b"])  # the large one fits nowhere now
        await queue.placed(late)
        assert queue.state(large) is JobState.PENDING and not desk.worker.refuses


async def test_nothing_is_kept_for_a_job_that_no_nodes_could_hold(tmp_path):
    async with at_work(Desk(open_engine(sqlite_url(tmp_path / "bagua.db")), options=OPTIONS)) as desk:
        queue, _, _ = await begin(desk)
        queue_of_three = await queue.submit(3, 1)
        desk.pass_time(OPTIONS.keep_after_s)
        assert queue.state(queue_of_three) is JobState.PENDING
        for name in ("a", "b"):
            await desk.service.drain(name, True)
        third = await desk.connect("c")
        queue.sessions["c"] = third
        await queue.placed(await queue.submit(1, 1))
