"""The socket for ranks, and what others may send to it."""

import os
import socket
import stat
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2  # noqa: F401  (reflection answers with it)
from rig.node_daemon import plan

import bagua
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import common_pb2, node_pb2, rank_pb2

SLEEP = "import time; time.sleep(600)\n"


async def started(end, script, nproc=1):
    await end.run_script("job", script(SLEEP), nproc=nproc)
    return [rank.pid for rank in (await end.runs()).ranks]


async def refusal(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


@pytest.fixture
def join(end, rank_stub):
    """Asks the daemon to let a process join."""

    def ask(rank, pid=0, job_id="job", timeout=10, **other):
        about = {"job_id": end.prefix + job_id, "wire_version": WIRE_VERSION, **other}
        return rank_stub.Join(rank_pb2.JoinRequest(rank=rank, pid=pid, **about), timeout=timeout)

    return ask


async def test_folders_and_sockets_are_private(end, daemon, script):
    await started(end, script)
    node, job = daemon.state / "node-n", f"{end.prefix}job"
    for path in (node, node / "journal", node / "jobs", node / "jobs" / job):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    sockets = [path for path in Path(daemon.ready["socket"]).parent.iterdir() if path.is_socket()]
    assert len(sockets) == 2, "for control and for data"
    for path in [*sockets, node / "journal" / f"{job}.json", node / "jobs" / job / "rank-0.log"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_join(end, daemon, join, script):
    pids = await started(end, script, 2)
    reply = await join(1, pids[1])
    assert (reply.generation, reply.world_size, reply.host_index) == (1, 2, 0)
    assert [(host.node_id, list(host.ranks)) for host in reply.hosts] == [("n", [0, 1])]
    assert len(reply.data_token) == 32 and Path(reply.data_socket).is_socket()
    assert await join(1, pids[1]) == reply, "it has not used the token yet"
    assert (await join(0, pids[0])).data_token != reply.data_token
    for other in ({"version": "9.1", "wire_version": WIRE_VERSION + 1}, {"version": "0.9", "wire_version": 0}):
        code, words = await refusal(join(0, pids[0], **other))  # a process of another release is told both
        assert code is grpc.StatusCode.FAILED_PRECONDITION and "[BG924]" in words
        assert f"bagua {other['version']} (wire version {other['wire_version']})" in words
        assert f"{bagua.__version__} (wire version {WIRE_VERSION})" in words
    for call, wanted, part in (
        (join(1, os.getpid()), grpc.StatusCode.ALREADY_EXISTS, "rank 1"),
        (join(9), grpc.StatusCode.NOT_FOUND, "not on this node"),
        (join(0, job_id="none", timeout=0.5), grpc.StatusCode.NOT_FOUND, ""),
    ):
        code, words = await refusal(call)
        assert code is wanted and part in words
    await join(0, pids[0])
    await end.end_job()
    code, words = await refusal(join(0))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "test" in words


async def test_progress_goes_up_and_the_latest_wins(end, daemon, rank_stub, script):
    await started(end, script)
    job = f"{end.prefix}job"
    for step in range(50):
        report = common_pb2.Progress(job_id=job, rank=0, step=step, total=50, metrics={"loss": 1.0 / (step + 1)})
        await rank_stub.ReportProgress(report, timeout=5)
    await end.until(lambda: end.progress and end.progress[-1].step == 49)
    assert end.progress[-1].metrics["loss"] == pytest.approx(0.02)
    assert (await rank_stub.DescribeWaits(rank_pb2.DescribeWaitsRequest(job_id=job), timeout=5)).waiting == ""
    for about, wanted in (
        ({"job_id": job, "message": "x" * 5000}, grpc.StatusCode.INVALID_ARGUMENT),
        ({"job_id": job, "message": "x" * (2 << 20)}, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ({"job_id": "other"}, grpc.StatusCode.NOT_FOUND),
        ({"job_id": job, "rank": 5}, grpc.StatusCode.NOT_FOUND),
    ):
        code, _ = await refusal(rank_stub.ReportProgress(common_pb2.Progress(**about), timeout=5))
        assert code is wanted


async def test_garbage(end, daemon, join, script):
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
    (pid,) = await started(end, script)
    await join(0, pid)


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
    hosts = [plan([0]), plan([1], "other")]
    more = {"entry": str(script(SLEEP)), "nnodes": 2, "nproc_per_node": 1}
    await end.run("job", hosts, **more)
    job = await end.job_until("job", lambda job: job.engine_address)
    address, port = job.engine_address.rsplit(":", 1)
    assert address == "127.0.0.1" and int(port) > 0
    with socket.create_server(("127.0.0.1", 0)) as other:
        hosts[0].engine_address = job.engine_address
        hosts[1].engine_address = "{}:{}".format(*other.getsockname())
        for _ in range(2):
            await end.run("job", hosts, **more)
        beats = end.heartbeats
        await end.until(lambda: end.heartbeats > beats + 1)
        assert end.jobs["job"].error == ""
    assert end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STARTED
