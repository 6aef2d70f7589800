"""The coordinator when its disk is full or its database damaged: words, what runs goes on, and so does it.

The limit of file sizes stands for the disk: it needs no root, and can be lifted while the coordinator runs.
"""

import resource

import pytest

from bagua.base.errors import UnavailableError
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

RUNNING = {"state": c.RANK_STATE_RUNNING, "pid": 77}
DONE = {"state": c.RANK_STATE_EXITED, "pid": 77, "exited_at": 5.0}
SPEC = c.JobSpec(entry="t.py", nnodes=1, nproc_per_node=1, placement_timeout_s=30.0, stop_grace_s=1.0)


@pytest.fixture
def coordinator(start):
    return start()


def limit_files(pid, size=resource.RLIM_INFINITY):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_a_job_that_ends_while_the_disk_is_full_has_ended_once_there_is_room(coordinator, client, connect, until):
    a = connect(coordinator, "a")
    job = client.submit(SPEC)
    run = a.expect(n.RunJob)
    a.report(run, n.LOCAL_PHASE_STARTED, {0: RUNNING})
    until(client, job.job_id, c.JOB_STATE_RUNNING)

    limit_files(coordinator.process.pid, 0)
    with pytest.raises(UnavailableError) as error:
        client.submit(SPEC)
    assert f"The disk of {coordinator.state_dir / 'coordinator'} " in str(error.value)
    assert "bagua.db" in str(error.value) and "goes on by itself" in str(error.value)
    a.report(run, n.LOCAL_PHASE_STARTED, {0: DONE})

    limit_files(coordinator.process.pid)
    # The stream may have ended meanwhile; a daemon comes back and says everything again.
    ended = n.LocalJob(job_id=job.job_id, generation=run.generation, phase=n.LOCAL_PHASE_STOPPED)
    ended.ranks.append(c.RankStatus(rank=0, node_id="a", **DONE))
    connect(coordinator, "a", jobs=(ended,))
    assert until(client, job.job_id, c.JOB_STATE_SUCCEEDED).ranks[0].exit_code == 0
    client.submit(SPEC)
    assert coordinator.process.poll() is None
