"""A real node daemon in a process of its own, and the other end of its stream, which does what the test says."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import psutil
import pytest
from rig.limits import SOON_S
from rig.ports import free_port

from bagua.base.code_archive import PIECE_BYTES
from bagua.base.daemon_process import daemon_pid
from bagua.base.security import create_token, server_credentials
from bagua.proto import common_pb2, node_pb2
from bagua.proto.node_pb2_grpc import NodeServiceServicer, add_NodeServiceServicer_to_server
from bagua.proto.rank_pb2_grpc import RankServiceStub

PATIENCE_S = 240.0  # the first job of all may build the core


class CoordinatorEnd(NodeServiceServicer):
    """Speaks NodeService. Remembers the last LocalJob of every job and everything else that came."""

    def __init__(self, token):
        self.token = token
        self.hellos = []
        self.jobs = {}
        self.history = []
        self.progress = []
        self.statuses = []
        self.refusals = []
        self.heartbeats = 0
        self.logs = {}
        self.log_ends = {}
        self.missing = {}  # bytes of a log that are gone
        self.code = None  # of every job; None: it has none
        self.code_questions = []
        self.answers_code = None  # until it is set, none is answered
        self.answers = set()
        self.heartbeat_s = 0.2
        self.fence_s = 0.0
        self.sole = False
        self.grant = None
        self.database_away = False  # Welcome has to wait
        self.versions = {}
        self.acknowledges = True
        self.read_pause_s = 0.0  # before each message
        self.acknowledged = 0
        self.older = asyncio.Event()  # set: the session ends
        self.error = ""  # with which it ends then, if any
        self.context = None
        self.changed = asyncio.Condition()
        self.writing = asyncio.Lock()
        self.port = free_port()
        self.server = None

    async def start(self, tls=None):
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_NodeServiceServicer_to_server(self, self.server)
        if tls is None:
            self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        else:
            self.port = self.server.add_secure_port(f"127.0.0.1:{self.port}", server_credentials(tls))
        await self.server.start()

    async def stop(self):
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    async def Session(self, request_iterator, context):
        if ("authorization", f"Bearer {self.token}") not in context.invocation_metadata():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        older = self.older
        over = asyncio.ensure_future(older.wait())
        while not older.is_set():
            await asyncio.sleep(self.read_pause_s)
            read = asyncio.ensure_future(context.read())
            await asyncio.wait([read, over], return_when=asyncio.FIRST_COMPLETED)
            if not read.done() or not isinstance(read.result(), node_pb2.NodeFact):
                read.cancel()
                if older.is_set() and self.error:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, self.error)
                break
            async with self.changed:
                await self._take(read.result(), context)
                self.changed.notify_all()
        over.cancel()

    async def welcome_again(self, **terms):
        """Ends the stream; the daemon comes back and gets new terms."""
        for name, value in terms.items():
            setattr(self, name, value)
        known = len(self.hellos)
        self.older.set()
        self.older = asyncio.Event()
        await self.until(lambda: len(self.hellos) > known)

    async def _take(self, fact, context):
        match fact.WhichOneof("fact"):
            case "hello":
                self.hellos.append(fact.hello)
                self.jobs.update({job.job_id: job for job in fact.hello.jobs})
                self.context = context
                terms = {"heartbeat_s": self.heartbeat_s, "lease_s": 5, "fence_s": self.fence_s, "sole": self.sole}
                welcome = node_pb2.Welcome(**terms, **self.versions, grant=self.grant)
                await self.send(**{"terms" if self.database_away else "welcome": welcome})
            case "heartbeat":
                self.heartbeats += 1
                if fact.heartbeat.seq and self.acknowledges:
                    await self.send(ack=node_pb2.HeartbeatAck(seq=fact.heartbeat.seq, grant=self.grant))
                    self.acknowledged += 1
            case "job":
                self.jobs[fact.job.job_id] = fact.job
                self.history.append(fact.job)
            case "status":
                self.statuses.append(fact.status)
            case "upgrade_refusal":
                self.refusals.append(fact.upgrade_refusal)
            case "progress":
                self.progress.append(fact.progress)
            case "code":
                self.code_questions.append((fact.code.job_id, fact.code.piece))
                answer = asyncio.ensure_future(self._answer(fact.code))
                self.answers.add(answer)
                answer.add_done_callback(self.answers.discard)
            case "log":
                known = self.logs.get(fact.log.request_id, b"")
                self.logs[fact.log.request_id] = known + fact.log.chunk.data
                self.missing[fact.log.request_id] = self.missing.get(fact.log.request_id, 0) + fact.log.chunk.missing
                if fact.log.chunk.eof or fact.log.chunk.more:
                    self.log_ends[fact.log.request_id] = fact.log.chunk

    async def _answer(self, question):
        if self.answers_code is not None:
            await self.answers_code.wait()
        begin = question.piece * PIECE_BYTES
        found = {"error": "not here"} if self.code is None else {"data": self.code[begin : begin + PIECE_BYTES]}
        await self.send(code=node_pb2.CodeAnswer(request_id=question.request_id, **found))

    async def send(self, **directive):
        async with self.writing:  # grpc.aio takes one write at a time
            await self.context.write(node_pb2.Directive(**directive))

    async def until(self, condition, timeout_s=PATIENCE_S):
        """Waits for something that came over the wire to make ``condition`` true."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: bool(condition()))

    async def job_until(self, job_id, condition, timeout_s=PATIENCE_S):
        await self.until(lambda: job_id in self.jobs and condition(self.jobs[job_id]), timeout_s)
        return self.jobs[job_id]

    async def stopped(self, job_id, timeout_s=PATIENCE_S):
        return await self.job_until(job_id, lambda job: job.phase == node_pb2.LOCAL_PHASE_STOPPED, timeout_s)

    async def exited(self, job_id, timeout_s=PATIENCE_S):
        return await self.job_until(
            job_id, lambda job: all(rank.state == common_pb2.RANK_STATE_EXITED for rank in job.ranks), timeout_s
        )

    async def run_script(self, job_id, script, *, nproc=1, **spec):
        """RunJob for one host with ``nproc`` ranks."""
        generation, patience_s = spec.pop("generation", 1), spec.pop("patience_s", 0.0)
        spec.setdefault("stop_grace_s", 5.0)
        spec.setdefault("workdir", str(Path(script).parent) if Path(script).is_absolute() else "")
        await self.send(
            run=node_pb2.RunJob(
                job_id=job_id,
                generation=generation,
                spec=common_pb2.JobSpec(entry=str(script), nnodes=1, nproc_per_node=nproc, **spec),
                hosts=[node_pb2.HostPlan(node_id="n", address="127.0.0.1", ranks=range(nproc))],
                job_key=bytes(32),
                master_addr="127.0.0.1",
                master_port=12345,
                patience_s=patience_s,
            )
        )

    async def stop_job(self, job_id, grace_s=5.0, generation=1):
        await self.send(stop=node_pb2.StopJob(job_id=job_id, generation=generation, reason="test", grace_s=grace_s))


class DaemonProcess:
    """One ``python -m bagua.daemon.node``: a keeper, with a daemon."""

    def __init__(self, state, coordinator, *options, pass_fds=()):
        self.state = state
        self.ready = {}
        reader, writer = os.pipe()
        self._reader = reader
        self.errors = state.parent / f"{state.name}-daemon.err"
        command = [sys.executable, "-m", "bagua.daemon.node", "--coordinator", coordinator, "--state-dir", str(state)]
        command += ["--name", "n", "--node-id", "n", "--ready-fd", str(writer), *options]
        with open(self.errors, "ab") as errors:
            self.process = subprocess.Popen(command, pass_fds=[writer, *pass_fds], stderr=errors, cwd=state.parent)
        os.close(writer)

    @property
    def pid(self):
        return self.process.pid

    def proper(self):
        return psutil.Process(daemon_pid(self.pid))

    async def until_ready(self):
        line = await asyncio.wait_for(asyncio.to_thread(self._read_line), SOON_S)
        self.ready = json.loads(line) if line else {}
        return self.ready

    def _read_line(self):
        with os.fdopen(self._reader) as file:
            return file.readline()

    async def wait(self, timeout_s=SOON_S):
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
                raise

    def log(self):
        return self.errors.read_text()


@pytest.fixture
def state(short_folder):
    folder = short_folder / "state"
    folder.mkdir(mode=0o700)
    create_token(folder / "token")
    return folder


@pytest.fixture
async def end(state):
    coordinator = CoordinatorEnd((state / "token").read_text())
    await coordinator.start()
    yield coordinator
    await coordinator.stop()


@pytest.fixture
async def start_daemon(state, end):
    """Starts daemons; they are stopped at the end of the test, and must then have left nothing."""
    daemons = []

    async def start(*options, pass_fds=()):
        daemon = DaemonProcess(state, f"127.0.0.1:{end.port}", *options, pass_fds=pass_fds)
        daemons.append(daemon)
        await daemon.until_ready()
        return daemon

    yield start
    for daemon in daemons:
        await asyncio.to_thread(daemon.stop)


@pytest.fixture
async def daemon(start_daemon):
    started = await start_daemon()
    return started


@pytest.fixture
async def other_host(short_folder):
    """A second daemon, with the other end of its stream."""
    folder = short_folder / "other"
    folder.mkdir(mode=0o700)
    create_token(folder / "token")
    coordinator = CoordinatorEnd((folder / "token").read_text())
    await coordinator.start()
    started = DaemonProcess(folder, f"127.0.0.1:{coordinator.port}", "--node-id", "other")
    await started.until_ready()
    yield coordinator, started
    await asyncio.to_thread(started.stop)
    await coordinator.stop()


@pytest.fixture
async def rank_stub(daemon):
    async with grpc.aio.insecure_channel(f"unix:{daemon.ready['socket']}") as channel:
        yield RankServiceStub(channel)


@pytest.fixture
def script(tmp_path):

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def alive(pid):
    """True while the process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def until_gone(pids, timeout_s=SOON_S):
    """Waits for the end of processes that are not ours, by their pidfds."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            gone = asyncio.Event()
            loop.add_reader(descriptor, gone.set)
            try:
                await gone.wait()
            finally:
                loop.remove_reader(descriptor)
                os.close(descriptor)


@pytest.fixture(name="alive")
def alive_fixture():
    return alive


@pytest.fixture(name="until_gone")
def until_gone_fixture():
    return until_gone
