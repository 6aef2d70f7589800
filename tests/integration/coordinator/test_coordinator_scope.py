"""A token for one job: what it is good for, against a real coordinator."""

import grpc
import pytest

from bagua.base.errors import ConflictError, ForbiddenError, UnauthenticatedError
from bagua.base.job_token import Scope, first_of, following, make_token
from bagua.base.security import call_metadata
from bagua.client import Client
from bagua.proto import common_pb2 as c
from bagua.proto import job_pb2, job_pb2_grpc, node_pb2

FORBIDDEN = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def job(client):
    return client.submit(
        c.JobSpec(name="mine", entry="x", adopt=True, nnodes=1, nproc_per_node=1, placement_timeout_s=60)
    )


@pytest.fixture
def scoped(coordinator, job):
    with Client(coordinator.address, token=make_token(coordinator.token, Scope(job.job_id, "node-00001"))) as made:
        yield made


def test_it_sees_and_ends_its_own_job_alone(coordinator, client, job, scoped):
    other = client.submit(c.JobSpec(name="other", entry="x", nnodes=1, nproc_per_node=1, placement_timeout_s=60))
    for ask in (
        lambda: scoped.submit(c.JobSpec(entry="x", nnodes=1, nproc_per_node=1)),
        lambda: scoped.list(),
        lambda: scoped.nodes(),
        lambda: scoped.get(other.job_id),
        lambda: scoped.cancel(other.job_id),
        lambda: list(scoped.watch(other.job_id)),
        lambda: list(scoped.logs(other.job_id)),
        lambda: scoped.trace(other.job_id),
    ):
        with pytest.raises(ForbiddenError, match=f"good for job {job.job_id} alone"):
            ask()
    assert [found.state for found in client.list(limit=2)] == [c.JOB_STATE_PENDING] * 2
    with coordinator.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        token = make_token(coordinator.token, Scope(job.job_id, "node-00001"))
        job_pb2_grpc.JobServiceStub(channel).GetJob(job_pb2.GetJobRequest(), metadata=call_metadata(token))
    assert caught.value.code() is FORBIDDEN, "which names no job"
    with pytest.raises(ConflictError, match="waits for nodes"):  # allowed, but too early
        scoped.trace(job.job_id)
    scoped.cancel(job.job_id)
    assert list(scoped.watch(job.job_id))[-1].job.state == c.JOB_STATE_CANCELLED


def test_its_daemon_is_one_node_and_tells_of_one_job(coordinator, connect, job, client):
    token = make_token(coordinator.token, Scope(job.job_id, "node-00001"))
    with pytest.raises(grpc.RpcError) as caught:
        connect(coordinator, "node-00002", token=token)
    assert caught.value.code() is FORBIDDEN and "node-00001 alone" in caught.value.details()
    peer = connect(coordinator, "node-00001", token=token, slots=1)
    run = peer.expect(node_pb2.RunJob)
    assert run.job_id == job.job_id
    peer.send(node_pb2.NodeFact(job=node_pb2.LocalJob(job_id="another", generation=1)))
    with pytest.raises(grpc.RpcError) as caught:
        while True:
            peer.next()
    assert caught.value.code() is FORBIDDEN and job.job_id in caught.value.details()
    client.cancel(job.job_id)


def test_it_covers_jobs_that_follow_its_own_in_the_cluster():
    scope = Scope("job-0123456789", "node-00001")
    covered = [scope.job_id, following(scope.job_id, 1), following(scope.job_id, 12)]
    assert all(scope.covers(job_id) and first_of(job_id) == scope.job_id for job_id in covered)
    assert not any(scope.covers(job_id) for job_id in ("", "job-", "job-01234567890", "job-9876543210.1"))


def test_of_another_coordinator_or_changed_it_is_no_token(coordinator, job):
    token = make_token(coordinator.token, Scope(job.job_id, "node-00001"))
    forged = make_token("guessed", Scope(job.job_id, "node-00001"))
    for shown in (forged, token[:-1], token.replace("node-00001", "node-00002"), token.replace("job~", "")):
        with Client(coordinator.address, token=shown) as stranger, pytest.raises(UnauthenticatedError):
            stranger.get(job.job_id)
