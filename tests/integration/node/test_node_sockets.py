"""The socket for ranks, and what others may send to it."""

import os
import socket
import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2  # noqa: F401  (reflection answers with it)

import bagua
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import common_pb2, node_pb2, rank_pb2

SLEEP = "import time; time.sleep(600)\n"
RUNNING = common_pb2.RANK_STATE_RUNNING


async def started(end, job_id="job"):
    job = await end.job_until(job_id, lambda job: job.ranks and all(rank.state == RUNNING for rank in job.ranks))
    return [rank.pid for rank in job.ranks]


def asked(rank, pid, **other):
    return rank_pb2.JoinRequest(job_id="job", rank=rank, pid=pid, **{"wire_version": WIRE_VERSION, **other})


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


async def test_folders_and_sockets_are_private(end, daemon, state, script):
    await end.run_script("job", script(SLEEP))
    await started(end)
    node = state / "node-n"
    for path in (node, node / "journal", node / "jobs", node / "jobs" / "job"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    sockets = [path for path in Path(daemon.ready["socket"]).parent.iterdir() if path.is_socket()]
    assert len(sockets) == 2, "for control and for data"
    for path in [*sockets, node / "journal" / "job.json", node / "jobs" / "job" / "rank-0.log"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_join(end, daemon, rank_stub, script):
    await end.run_script("job", script(SLEEP), nproc=2)
    pids = await started(end)
    reply = await rank_stub.Join(asked(1, pids[1]), timeout=10)
    assert (reply.generation, reply.world_size, reply.host_index) == (1, 2, 0)
    assert [(host.node_id, list(host.ranks)) for host in reply.hosts] == [("n", [0, 1])]
    assert len(reply.data_token) == 32 and Path(reply.data_socket).is_socket()
    again = await rank_stub.Join(asked(1, pids[1]), timeout=10)
    assert again == reply, "it has not used the token yet"
    other = await rank_stub.Join(asked(0, pids[0]), timeout=10)
    assert other.data_token != reply.data_token
    code, words = await refusal(rank_stub.Join(asked(1, os.getpid()), timeout=10))
    assert code is grpc.StatusCode.ALREADY_EXISTS and "rank 1" in words
    code, words = await refusal(rank_stub.Join(rank_pb2.JoinRequest(job_id="job", rank=9), timeout=10))
    assert code is grpc.StatusCode.NOT_FOUND and "not on this node" in words
    code, _ = await refusal(rank_stub.Join(rank_pb2.JoinRequest(job_id="none", rank=0), timeout=0.5))
    assert code is grpc.StatusCode.NOT_FOUND
    await end.stop_job("job")
    await end.stopped("job")
    code, words = await refusal(rank_stub.Join(rank_pb2.JoinRequest(job_id="job", rank=0), timeout=10))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "test" in words


async def test_a_process_of_another_release_does_not_join(end, daemon, rank_stub, script):
    """It is told both; the job goes on."""
    await end.run_script("job", script(SLEEP))
    (pid,) = await started(end)
    for other in ({"version": "9.1", "wire_version": WIRE_VERSION + 1}, {"version": "0.9", "wire_version": 0}):
        code, words = await refusal(rank_stub.Join(asked(0, pid, **other), timeout=10))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"bagua {other['version']} (wire version {other['wire_version']})" in words
        assert f"{bagua.__version__} (wire version {WIRE_VERSION})" in words and "[BG924]" in words
    await rank_stub.Join(asked(0, pid), timeout=10)


async def test_progress_goes_up_and_the_latest_wins(end, daemon, rank_stub, script):
    await end.run_script("job", script(SLEEP))
    await started(end)
    for step in range(50):
        report = common_pb2.Progress(job_id="job", rank=0, step=step, total=50, metrics={"loss": 1.0 / (step + 1)})
        await rank_stub.ReportProgress(report, timeout=5)
    await end.until(lambda: end.progress and end.progress[-1].step == 49)
    assert end.progress[-1].metrics["loss"] == pytest.approx(0.02)
    assert (await rank_stub.DescribeWaits(rank_pb2.DescribeWaitsRequest(job_id="job"), timeout=5)).waiting == ""
    bad = common_pb2.Progress(job_id="job", message="x" * 5000)
    code, _ = await refusal(rank_stub.ReportProgress(bad, timeout=5))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    for job_id, rank in (("other", 0), ("job", 5)):
        code, _ = await refusal(rank_stub.ReportProgress(common_pb2.Progress(job_id=job_id, rank=rank), timeout=5))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_garbage_and_oversized_messages(end, daemon, rank_stub, script):
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(65536), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.settimeout(10)
            raw.connect(daemon.ready["socket"])
            try:
                raw.sendall(garbage)
                while raw.recv(65536):  # until the daemon closes it
                    pass
            except ConnectionError:
                pass
    big = common_pb2.Progress(job_id="job", message="x" * (2 << 20))
    code, _ = await refusal(rank_stub.ReportProgress(big, timeout=5))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    await end.run_script("job", script(SLEEP))
    (pid,) = await started(end)
    await rank_stub.Join(asked(0, pid), timeout=10)


async def test_a_long_state_path_gets_its_sockets_elsewhere(end, short_folder, state, monkeypatch, start_daemon):
    deep = state / ("d" * 120)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder / "run"))
    (short_folder / "run").mkdir(mode=0o700)
    daemon = await start_daemon("--state-dir", str(deep), "--token-file", str(state / "token"))
    path = Path(daemon.ready["socket"])
    assert path.parent.parent == short_folder / "run" / "bagua" and len(str(path)) < 108 and path.is_socket()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    daemon.stop()
    assert not path.parent.exists()


async def test_two_hosts_get_their_peers(end, daemon, script):
    """The daemon says where its engine listens, and hands the addresses on when all are known."""
    run = node_pb2.RunJob(
        job_id="job",
        generation=1,
        spec=common_pb2.JobSpec(entry=str(script(SLEEP)), nnodes=2, nproc_per_node=1),
        hosts=[node_pb2.HostPlan(node_id="n", ranks=[0]), node_pb2.HostPlan(node_id="other", ranks=[1])],
        job_key=bytes(32),
    )
    await end.send(run=run)
    job = await end.job_until("job", lambda job: job.engine_address)
    host, port = job.engine_address.rsplit(":", 1)
    assert host == "127.0.0.1" and int(port) > 0
    with socket.create_server(("127.0.0.1", 0)) as other:
        run.hosts[0].engine_address = job.engine_address
        run.hosts[1].engine_address = "{}:{}".format(*other.getsockname())
        await end.send(run=run)
        await end.send(run=run)
        beats = end.heartbeats
        await end.until(lambda: end.heartbeats > beats + 1)
        assert end.jobs["job"].error == ""
    await end.stop_job("job")
    await end.stopped("job")
