"""A node of which is told from outside that nothing runs there any more."""

import pytest
from rig.coordinator.desk import Desk, at_work

from bagua.base.errors import ConflictError
from bagua.daemon.coordinator.rules.domain import JobState, LocalJob, LocalRank, Phase, RankState
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.proto import common_pb2

WHY = "its pod is gone: OOMKilled (exit code 137)"


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("stops", [False, True])
async def test_nobody_waits_for_ranks_of_a_node_that_is_gone(tmp_path, elastic, stops):
    """No time passes here, so no lease and no fence ends."""
    async with at_work(Desk(open_engine(sqlite_url(tmp_path / "bagua.db")), options=Options(fence_s=600))) as desk:
        sessions = {name: await desk.connect(name) for name in ("a", "b")}
        wanted = common_pb2.JobSpec(entry="t.py", nnodes=2, nproc_per_node=1, elastic=elastic)
        wanted.min_nodes, wanted.max_nodes = (1, 2) if elastic else (0, 0)
        job_id = (await desk.service.submit(checked_spec(wanted), "")).job_id

        def state():
            job = desk.board.job(job_id)
            return None if job is None else job.state

        await desk.until(lambda: state() is JobState.STARTING)
        job = desk.board.job(job_id)
        for host in job.hosts:
            ranks = tuple(LocalRank(rank.rank, RankState.RUNNING, 7, member=rank.number) for rank in host.ranks)
            fact = LocalJob(job_id, 1, Phase.STARTED, engine_address="127.0.0.1:9", ranks=ranks, entered=1)
            desk.intake.fact(sessions[host.node_id], fact)
        await desk.until(lambda: state() is JobState.RUNNING)
        with pytest.raises(ConflictError, match="has a session"):
            desk.service.gone("b", WHY)
        desk.leave(sessions["b"])
        if stops:
            await desk.service.cancel(job_id, "enough")
        desk.service.gone("b", WHY)
        if elastic and not stops:
            await desk.until(lambda: (job := desk.board.job(job_id)) is not None and len(job.hosts) == 1)
            assert state() is JobState.RUNNING
            return
        await desk.until(lambda: state() is JobState.STOPPING)
        over = tuple(LocalRank(rank.rank, RankState.EXITED, 7, member=rank.number) for rank in job.hosts[0].ranks)
        desk.intake.fact(sessions["a"], LocalJob(job_id, 1, Phase.STOPPED, ranks=over))
        await desk.until(lambda: state() is None)
        ended = await desk.service.job(job_id)
        assert ended.state is (JobState.CANCELLED if stops else JobState.FAILED)
        assert stops or WHY in ended.reason
