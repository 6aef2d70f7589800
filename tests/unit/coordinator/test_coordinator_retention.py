"""Jobs that expire."""

import math
from dataclasses import replace

import pytest
from rig.coordinator.desk import Desk, at_work

from bagua.base.retention import Keep
from bagua.daemon.coordinator.rules.domain import Change, JobState
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.daemon.coordinator.use.retention import Retention
from bagua.proto import common_pb2

DAY_S = 86_400.0
SPEC = checked_spec(common_pb2.JobSpec(entry="t.py", nnodes=1, nproc_per_node=9, placement_timeout_s=1e6))


@pytest.mark.parametrize(
    ("keep", "left"), [(Keep(math.inf, 20), 20), (Keep(15.5 * DAY_S, 10**6), 16), (Keep(), 30), (Keep(size=5_000), 10)]
)
async def test_old_jobs_go_in_small_steps_and_living_ones_stay(tmp_path, keep, left):
    """130 jobs ended, one a day; three wait."""
    async with at_work(Desk(open_engine(sqlite_url(tmp_path / "bagua.db")))) as desk:
        waiting = [(await desk.service.submit(SPEC, "")).job_id for _ in range(3)]
        now = desk.clock.wall()
        with desk.store.transaction() as tx:
            for number in range(130):
                old = replace(desk.board.jobs[waiting[0]].job, job_id=f"job-{number}")
                tx.create_job(old, None, "me")
                ended = replace(old, state=JobState.FAILED, finished_at=now - (number + 0.5) * DAY_S)
                tx.save([Change(tx.stored([old.job_id])[0], ended, (), "me")])
        retention = Retention(desk.worker, desk.clock, keep, desk.publisher.forget)
        steps = []
        while found := await retention.step():
            steps.append(found)
        assert sum(steps) == 130 - left and max(steps) <= 20
        jobs = {job.job_id for job in (await desk.service.jobs([], 1_000, ""))[0]}
        assert jobs == {*waiting, *(f"job-{number}" for number in range(left))}
        assert set(desk.board.jobs) == set(waiting)
