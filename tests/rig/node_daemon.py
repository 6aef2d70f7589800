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

from bagua.base.code_archive import PIECE_BYTES
from bagua.base.daemon_process import daemon_pid
from bagua.base.security import create_token, server_credentials
from bagua.proto import common_pb2, node_pb2
from bagua.proto.node_pb2_grpc import NodeServiceServicer, add_NodeServiceServicer_to_server
from rig.limits import SOON_S
from rig.ports import free_port

PATIENCE_S = 240.0  # the first job of all may build the core
TERMS = {"heartbeat_s": 0.2, "lease_s": 5.0, "fence_s": 0.0, "sole": False}


ELSEWHERE = [
    node_pb2.HostPlan(
        node_id=f"elsewhere-{host}",
        address="127.0.0.1",
        engine_address=f"127.0.0.1:{9 + host}",
        ranks=[host],
        members=[98 + host],
    )
    for host in (0, 1)
]
"""Two hosts without this node. Nobody listens there."""


def plan(ranks, node_id="n", **more):
    """A part of a job, on loopback."""
    return node_pb2.HostPlan(node_id=node_id, address="127.0.0.1", ranks=ranks, **more)


class CoordinatorEnd(NodeServiceServicer):
    """Speaks NodeService. Remembers the last LocalJob of every job and everything else that came.

    ``prefix``: of the ids of this test's jobs, on a daemon that several tests have. Tests don't see it.
    """

    def __init__(self, token):
        self.token = token
        self.hellos = []
        self.heartbeats = self.acknowledged = 0
        self.context = self.server = None
        self.older = asyncio.Event()  # set: the session ends
        self.changed = asyncio.Condition()
        self.writing = asyncio.Lock()
        self.port = free_port()
        self.begin()

    def begin(self, prefix=""):
        """Forgets the test before."""
        self.prefix = prefix
        self.hellos = self.hellos[-1:]
        self.jobs = {}
        self.history, self.progress, self.statuses, self.refusals = [], [], [], []
        self.logs, self.log_ends = {}, {}
        self.missing = {}  # bytes of a log that are gone
        self.code = None  # of every job; None: it has none
        self.code_questions = []
        self.answers_code = None  # until it is set, none is answered
        self.answers = set()
        self.terms = dict(TERMS)
        self.grant = None
        self.database_away = False  # Welcome has to wait
        self.versions = {}
        self.acknowledges = True
        self.read_pause_s = 0.0  # before each message
        self.error = ""  # with which the session ends, if any

    async def start(self, tls=None):
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        add_NodeServiceServicer_to_server(self, self.server)
        place = f"127.0.0.1:{self.port}"
        if tls is None:
            self.server.add_insecure_port(place)
        else:
            self.server.add_secure_port(place, server_credentials(tls))
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

    async def welcome_again(self, grant=None, error="", **terms):
        """Ends the stream; the daemon comes back and gets new terms."""
        self.grant, self.error = grant, error
        self.terms |= terms
        known = len(self.hellos)
        self.older.set()
        self.older = asyncio.Event()
        await self.until(lambda: len(self.hellos) > known)

    async def renewed(self):
        """The daemon knows its lease."""
        known = self.acknowledged
        await self.until(lambda: self.acknowledged > known)

    def _mine(self, about):
        """Whether it is of this test; its job has the test's own name then."""
        mine = about.job_id.startswith(self.prefix)
        about.job_id = about.job_id.removeprefix(self.prefix)
        return mine

    async def _take(self, fact, context):
        kind = fact.WhichOneof("fact")
        told = getattr(fact, kind)
        match kind:
            case "hello":
                jobs = [job for job in told.jobs if self._mine(job)]
                hello = node_pb2.Hello()
                hello.CopyFrom(told)
                del hello.jobs[:]
                hello.jobs.extend(jobs)
                self.hellos.append(hello)
                self.jobs.update({job.job_id: job for job in jobs})
                self.context = context
                welcome = node_pb2.Welcome(**self.terms, **self.versions, grant=self.grant)
                await self.send(**{"terms" if self.database_away else "welcome": welcome})
            case "heartbeat":
                self.heartbeats += 1
                if told.seq and self.acknowledges:
                    await self.send(ack=node_pb2.HeartbeatAck(seq=told.seq, grant=self.grant))
                    self.acknowledged += 1
            case "job" if self._mine(told):
                self.jobs[told.job_id] = told
                self.history.append(told)
            case "status":
                self.statuses.append(told)
            case "upgrade_refusal":
                self.refusals.append(told)
            case "progress" if self._mine(told):
                self.progress.append(told)
            case "code" if self._mine(told):
                self.code_questions.append((told.job_id, told.piece))
                answer = asyncio.ensure_future(self._answer(told))
                self.answers.add(answer)
                answer.add_done_callback(self.answers.discard)
            case "log":
                chunk, number = told.chunk, told.request_id
                self.logs[number] = self.logs.get(number, b"") + chunk.data
                self.missing[number] = self.missing.get(number, 0) + chunk.missing
                if chunk.eof or chunk.more:
                    self.log_ends[number] = chunk

    async def _answer(self, question):
        if self.answers_code is not None:
            await self.answers_code.wait()
        begin = question.piece * PIECE_BYTES
        found = {"error": "not here"} if self.code is None else {"data": self.code[begin : begin + PIECE_BYTES]}
        await self.send(code=node_pb2.CodeAnswer(request_id=question.request_id, **found))

    async def send(self, **directive):
        made = node_pb2.Directive(**directive)
        about = getattr(made, made.WhichOneof("directive"))
        if "job_id" in about.DESCRIPTOR.fields_by_name:
            about.job_id = self.prefix + about.job_id
        async with self.writing:  # grpc.aio takes one write at a time
            await self.context.write(made)

    async def until(self, condition, timeout_s=PATIENCE_S):
        """Waits for something that came over the wire to make ``condition`` true."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: bool(condition()))

    async def job_until(self, job_id, condition, timeout_s=PATIENCE_S):
        await self.until(lambda: job_id in self.jobs and condition(self.jobs[job_id]), timeout_s)
        return self.jobs[job_id]

    async def stopped(self, job_id, timeout_s=PATIENCE_S):
        return await self.job_until(job_id, lambda job: job.phase == node_pb2.LOCAL_PHASE_STOPPED, timeout_s)

    async def exited(self, job_id):
        return await self.job_until(job_id, lambda job: _states(job) <= {common_pb2.RANK_STATE_EXITED})

    async def runs(self, job_id="job"):
        """The job as soon as all of its ranks run."""
        return await self.job_until(job_id, lambda job: _states(job) == {common_pb2.RANK_STATE_RUNNING})

    async def run(self, job_id, hosts, generation=1, **more):
        """RunJob. ``more``: fields of the specification, and some of RunJob itself."""
        names = ("host_index", "joining", "planned", "hold", "patience_s")
        how = {name: more.pop(name) for name in names if name in more}
        spec = common_pb2.JobSpec(**{"nnodes": 1, "stop_grace_s": 5.0, **more})
        place = {"job_key": bytes(32), "master_addr": "127.0.0.1", "master_port": 12345}
        made = node_pb2.RunJob(job_id=job_id, generation=generation, spec=spec, hosts=hosts, **place, **how)
        await self.send(run=made)

    async def run_script(self, job_id, script, *, nproc=1, **more):
        """RunJob for one host with ``nproc`` ranks."""
        more.setdefault("workdir", str(Path(script).parent) if Path(script).is_absolute() else "")
        await self.run(job_id, [plan(range(nproc))], entry=str(script), nproc_per_node=nproc, **more)

    async def run_members(self, members, generation=1, joining=(), **more):
        """RunJob of the elastic job "job". ``members`` are those of this node; none: it goes on elsewhere."""
        more |= {"elastic": True, "host_index": 0 if members else 0xFFFFFFFF}
        if joining:
            more["joining"] = [plan(range(len(joining)), members=joining)]
        hosts = [plan(range(len(members)), members=members)] if members else ELSEWHERE
        await self.run("job", hosts, generation, **more)

    async def stop_job(self, job_id="job", grace_s=5.0, generation=1):
        await self.send(stop=node_pb2.StopJob(job_id=job_id, generation=generation, reason="test", grace_s=grace_s))

    async def end_job(self, job_id="job", **how):
        """Stops it; the job as it then is."""
        await self.stop_job(job_id, **how)
        return await self.stopped(job_id)

    async def end_jobs(self):
        """All that a test has left."""
        for job in [job for job in self.jobs.values() if job.phase != node_pb2.LOCAL_PHASE_STOPPED]:
            await self.stop_job(job.job_id, 0.0, job.generation)
            await self.stopped(job.job_id, SOON_S)


def _states(job):
    return {rank.state for rank in job.ranks}


class DaemonProcess:
    """One ``python -m bagua.daemon.node``: a keeper, with a daemon."""

    def __init__(self, state, coordinator, *options, pass_fds=()):
        self.state = state
        self.ready = {}
        self.said = 0  # in tests before
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
        return self

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
        return self.errors.read_text()[self.said :]


class Pair:
    """A daemon in the folder, and the other end of its stream."""

    def __init__(self, folder, *options):
        self.options = options
        self.state = make_state(folder)
        self.end = CoordinatorEnd((self.state / "token").read_text())

    async def start(self):
        await self.end.start()
        self.daemon = DaemonProcess(self.state, f"127.0.0.1:{self.end.port}", *self.options)
        await self.daemon.until_ready()
        return self

    async def stop(self):
        await asyncio.to_thread(self.daemon.stop)
        await self.end.stop()


def make_state(folder):
    """A daemon's folder, with its token."""
    folder.mkdir(mode=0o700)
    create_token(folder / "token")
    return folder


def printed(rank):
    return Path(rank.log_path).read_text().splitlines()


async def until_printed(ranks, line):
    """``line``: as it is, or a function of the rank. Their logs are files: nothing tells of a new line."""
    async with asyncio.timeout(PATIENCE_S):
        for rank in ranks:
            while (line(rank) if callable(line) else line) not in printed(rank):
                assert not rank.exit_code, printed(rank)
                await asyncio.sleep(0.02)


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
