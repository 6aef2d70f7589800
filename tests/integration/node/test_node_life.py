"""Start and end of the daemon: settings that can't work, signals, idleness, restart."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.node_daemon import until_gone
from rig.system.prometheus import check_metrics, families_in

from bagua.base import parent_socket
from bagua.base.memory_kills import KILLER
from bagua.daemon.coordinator.admin.certs import make_certificates
from bagua.daemon.node.host import metrics
from bagua.proto import node_pb2

SLEEP = "import time; time.sleep(600)\n"


def run_daemon(*options, **more):
    command = [sys.executable, "-m", "bagua.daemon.node", *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, **more)


def refused(*options):
    """The one error of a daemon that could not start. A warning may come before it: gRPC's stream can break before its
    answer is read, and is tried again."""
    result = run_daemon(*options)
    assert result.returncode == 2, result
    errors = [line for line in result.stderr.splitlines() if " [warning " not in line]
    assert len(errors) == 1 and errors[0].startswith("error: "), result.stderr
    return errors[0]


def here(end, state):
    return ["--state-dir", str(state), "--name", "n", "--coordinator", f"127.0.0.1:{end.port}"]


async def test_ready_line_and_identity(end, daemon):
    state = daemon.state
    assert daemon.ready == {"node_id": "n", "socket": str(state / "node-n" / "rank.sock"), "state_dir": str(state)}
    (hello,) = end.hellos
    assert hello.node_id == "n" and hello.address == "127.0.0.1" and hello.slots == os.cpu_count()
    assert hello.hostname == socket.gethostname() and len(hello.boot_id) == 16
    assert json.loads((state / "node-n" / "node.json").read_text()) == {"node_id": "n"}
    assert "Another node daemon uses" in await asyncio.to_thread(refused, *here(end, state))


async def test_an_acknowledgement_tells_how_often_to_speak(end, daemon):
    await end.welcome_again(heartbeat_s=0.05)
    await end.send(ack=node_pb2.HeartbeatAck(heartbeat_s=60))
    await end.end_job("first")  # so the acknowledgement was read
    known = end.heartbeats
    for number in range(100):
        await end.end_job(f"job-{number}")
    assert end.heartbeats <= known + 1  # one was due already


def test_settings_that_can_not_work(tmp_path, state):
    base = ["--state-dir", state, "--coordinator", "127.0.0.1:1"]
    assert "without TLS" in refused("--state-dir", state, "--coordinator", "192.0.2.1:7670")
    assert "--slots -1" in refused(*base, "--slots", "-1")
    (tmp_path / "file").write_text("")
    assert "can't be written" in refused("--state-dir", tmp_path / "file")
    reader, writer = os.pipe()
    options = ["--state-dir", state, "--coordinator", "nonsense", "--ready-fd", writer]
    assert run_daemon(*options, pass_fds=[writer]).returncode == 2
    os.close(writer)
    with os.fdopen(reader) as file:  # of the one who waits
        assert "is not an address" in json.loads(file.read())["error"]


async def test_coordinators_that_refuse(end, state, tmp_path):
    (tmp_path / "token").write_text("wrong")
    (tmp_path / "token").chmod(0o600)
    wrong = [*here(end, state), "--token-file", tmp_path / "token"]
    assert "refuses this daemon" in await asyncio.to_thread(refused, *wrong)
    end.versions = {"version": "9.1", "protocol": 90, "oldest_protocol": 89}
    words = await asyncio.to_thread(refused, *here(end, state))
    assert "has bagua 9.1 (protocol 90, from 89 on), which is too new for this one" in words


async def test_mutual_tls(end, start_daemon, script, tmp_path):
    files = make_certificates(tmp_path / "tls", ["127.0.0.1"])
    await end.stop()
    await end.start(files)
    daemon = await start_daemon("--tls", str(tmp_path / "tls"))
    assert daemon.ready["node_id"] == "n"
    await end.run_script("job", "/bin/true", no_python=True)
    await end.exited("job")


async def test_metrics(end, start_daemon, script, state):
    """Also of daemons that are reloaded and killed. The next one ends a job that can't go on with it, and knows how the
    last one died."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = await asyncio.to_thread(refused, *here(end, state), "--metrics-port", port)
        assert "Choose another --metrics-port" in words
    daemon = await start_daemon("--metrics-port", str(port))
    await end.run_script("job", script(SLEEP), nproc=2)
    await end.runs()

    def scrape():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
            return reply.read().decode()

    text = await asyncio.to_thread(scrape)
    assert "bagua_node_connected 1.0" in text and "bagua_node_ranks 2.0" in text
    assert 'bagua_engine_operations_total{job_id="job"}' in text and "bagua_node_slots" in text
    assert families_in(text) == {family.name for family in metrics.FAMILIES}
    check_metrics(text)
    reload, kill = lambda: daemon.process.send_signal(signal.SIGHUP), lambda: daemon.proper().kill()
    for end_it, kills in ((reload, 0), (kill, 1)):
        if kills:
            await end.run_script("killed", script(SLEEP))
            ranks = (await end.runs("killed")).ranks
        known = len(end.hellos)
        end_it()
        await end.until(lambda known=known: len(end.hellos) > known)
        assert f"bagua_node_daemon_kills_total {kills}.0" in await asyncio.to_thread(scrape)
    await until_gone([rank.pid for rank in ranks])
    last = await end.stopped("killed")
    assert f"the daemon on node n was killed by SIGKILL. {KILLER}" in last.error and last.withdrawn
    # Without a pid: the daemon was killed before it had written down that the rank runs.
    assert all(rank.follows or not rank.pid for rank in last.ranks), last


async def test_a_signal_ends_everything(end, start_daemon, script):
    """Ranks that ignore SIGTERM included."""
    daemon = await start_daemon()
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('.', flush=True)\n" + SLEEP
    await end.run_script("job", script(stubborn), nproc=2)
    ranks = (await end.runs()).ranks
    begin = time.monotonic()
    daemon.process.send_signal(signal.SIGINT)
    assert await daemon.wait(SOON_S) == 0
    assert time.monotonic() - begin < SOON_S
    await until_gone([rank.pid for rank in ranks])
    assert "the daemon on node n was stopped" in (await end.stopped("job")).error


@pytest.mark.parametrize("joined", [False, True])
async def test_the_processes_that_use_it_end(end, start_daemon, joined):
    """The one that started it, and one that came later. Without ranks it ends with them, else with its job."""
    rank, ours = parent_socket.pair()
    with ours:
        options = ["--exit-when-idle", "0.1", "--leash", str(ours.fileno())]
        daemon = await start_daemon(*options, pass_fds=[ours.fileno()])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(str(Path(daemon.ready["socket"]).with_name(parent_socket.CLUSTER_SOCKET)))
        rank.close()
        if joined:
            await end.run_script("job", "/bin/true", no_python=True)
            await end.exited("job")
        await asyncio.sleep(0.3)
        assert daemon.process.poll() is None, "somebody uses it"
    if joined:
        await asyncio.sleep(0.3)
        assert daemon.process.poll() is None, "the job is not over before the coordinator says so"
        await end.stop_job("job")
    assert await daemon.wait(20) == 0


@pytest.mark.parametrize("how", ["leash", "idle"])
async def test_nobody_is_left(end, start_daemon, how):
    """The process that started it ends; or it is idle, and the coordinator is gone too."""
    rank, ours = parent_socket.pair()
    with ours:
        options = ["--leash", str(ours.fileno())] if how == "leash" else ["--exit-when-idle", "0.3"]
        daemon = await start_daemon(*options, pass_fds=[ours.fileno()])
    if how == "idle":
        await end.run_script("job", "/bin/true", no_python=True)
        await end.exited("job")
        await end.stop()
    rank.close()
    assert await daemon.wait(30) == 0


async def test_death_signal(end, state):
    """The daemon goes when the process that started it does."""
    starter = (
        "import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-m', 'bagua.daemon.node', *sys.argv[1:]])\n"
    )
    starter += "print(child.pid, flush=True)\nsys.stdin.read(1)\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-c", starter, *here(end, state), "--death-signal"]
    with subprocess.Popen(command, **pipes) as parent:
        child = int(await asyncio.to_thread(parent.stdout.readline))
        await end.until(lambda: end.hellos)
        parent.kill()
    await until_gone([child])
    assert not (state / "node-n" / "rank.sock").exists(), "it ended in good order"


@pytest.mark.parametrize("delay_s", [0.0, 0.4])
async def test_a_daemon_whose_keeper_dies_while_it_starts(end, state, delay_s):
    """It would hold the lock of its folder, and take jobs that it can't start."""
    command = [sys.executable, "-m", "bagua.daemon.node", *here(end, state)]
    keeper = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children")
    while not (born := children.read_text().split()):
        await asyncio.sleep(0.01)
    await asyncio.sleep(delay_s)
    keeper.kill()
    keeper.wait()
    await until_gone([int(pid) for pid in born])
