"""Many node daemons in one process that speak the protocol and run nothing: the control plane's cost, without ranks.

Each has a connection and a stream of its own, and says what a real daemon would: a Hello, heartbeats, a LocalJob for
each change. A job whose entry is ``/bin/true`` ends by itself, every other runs until it is stopped, and ranks of an
elastic one can be killed. They answer at once.

``FleetProcess`` starts them in a process of their own, so that they don't share a lock with whoever measures.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from bagua.base.rpc import STEADY_WINDOW
from bagua.base.security import TlsFiles, call_metadata, channel_credentials
from bagua.proto import common_pb2, node_pb2

TRIVIAL = "/bin/true"
CONNECTING = 50  # at once
WAIT_S = 60.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    *STEADY_WINDOW,
]
_EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing in the type stubs


@dataclass
class Counts:
    """Facts that the daemons have seen and sent; times by ``time.monotonic``, 0: not yet."""

    connected: int = 0
    broken: int = 0  # streams that ended before they should
    directives: int = 0
    acknowledged: int = 0  # heartbeats
    finished: int = 0  # parts of jobs that ended by themselves
    started: int = 0  # parts of jobs whose ranks run
    stopped: int = 0  # parts of jobs that were stopped on request
    last_started_at: float = 0.0
    last_stopped_at: float = 0.0
    killed_at: float = 0.0  # when the last rank was killed
    regrouped: int = 0  # parts of jobs that have gone over to another generation
    last_regrouped_at: float = 0.0
    errors: list[str] = field(default_factory=list)


class Daemon:
    """One node."""

    def __init__(self, node_id, slots, counts):
        self._hello = node_pb2.Hello(
            node_id=node_id,
            hostname=node_id,
            address="127.0.0.1",
            slots=slots,
            version="rig",
            boot_id=f"boot-of-{node_id}",
            unpacks=True,
        )
        self._counts = counts
        self._held = {}
        self._call = None
        self._writing = asyncio.Lock()
        self._renewed = 0.0
        self._heartbeat_s = 0.0  # as the coordinator has told
        self._asked = {}  # number of a heartbeat -> when it was sent

    async def session(self, channel, token):
        """One stream, until it ends. Raises AioRpcError."""
        call = channel.stream_stream("/bagua.v1.NodeService/Session")(metadata=call_metadata(token))
        self._call = call
        held = [job for job in self._held.values() if job.phase != node_pb2.LOCAL_PHASE_STOPPED]
        hello = node_pb2.Hello(jobs=held)
        hello.MergeFrom(self._hello)
        await self._say(node_pb2.NodeFact(hello=hello))
        first = await call.read()
        if first is _EOF:
            await self._say(node_pb2.NodeFact())  # raises the status of the call
        self._counts.connected += 1
        self._renewed = time.monotonic()
        beat = asyncio.create_task(self._beat(node_pb2.Directive.FromString(first).welcome))
        try:
            while (data := await call.read()) is not _EOF:
                self._counts.directives += 1
                directive = node_pb2.Directive.FromString(data)
                if directive.HasField("run"):
                    if directive.run.packed:
                        directive.run.MergeFromString(zlib.decompress(directive.run.packed))
                    await self._run(directive.run)
                elif directive.HasField("stop"):
                    await self._stop(directive.stop)
                elif directive.HasField("ack") and directive.ack.seq in self._asked:
                    self._renewed = self._asked.pop(directive.ack.seq)
                    self._heartbeat_s = directive.ack.heartbeat_s or self._heartbeat_s
                    self._counts.acknowledged += 1
        finally:
            self._counts.connected -= 1
            beat.cancel()
            call.cancel()
            await asyncio.gather(beat, return_exceptions=True)

    async def _say(self, fact):
        async with self._writing:
            await self._call.write(fact.SerializeToString())

    async def _beat(self, welcome):
        """As a real daemon: an acknowledgement is asked for when the last one is old."""
        self._heartbeat_s = welcome.heartbeat_s
        await asyncio.sleep(random.uniform(0, welcome.heartbeat_s))  # daemons do not start at one moment
        patience = min(welcome.lease_s / 2, welcome.fence_s / 8)
        for seq in itertools.count(1):
            fact, now = node_pb2.NodeFact(heartbeat=node_pb2.Heartbeat()), time.monotonic()
            if welcome.fence_s and now >= self._renewed + patience:
                fact.heartbeat.seq = seq
                self._asked[seq] = now
            await self._say(fact)
            await asyncio.sleep(self._heartbeat_s)

    async def _run(self, run):
        held = self._held.get(run.job_id)
        if held is not None and held.generation == run.generation:
            await self._say(node_pb2.NodeFact(job=held))  # as a real daemon that learns addresses
            return
        if held is not None and run.spec.elastic:
            await self._regroup(held, run)
            return
        job = node_pb2.LocalJob(job_id=run.job_id, generation=run.generation, phase=node_pb2.LOCAL_PHASE_PREPARING)
        job.entered = run.generation
        first = run.host_index * run.spec.nproc_per_node
        for local in range(run.spec.nproc_per_node):
            job.ranks.add(
                rank=first + local, local_rank=local, member=first + local, state=common_pb2.RANK_STATE_WAITING
            )
        self._held[run.job_id] = job
        await self._say(node_pb2.NodeFact(job=job))
        job.phase = node_pb2.LOCAL_PHASE_STARTED
        job.engine_address = f"127.0.0.1:{10_000 + run.host_index}"
        for rank in job.ranks:
            rank.state, rank.pid = common_pb2.RANK_STATE_RUNNING, 1_000 + rank.rank
            rank.log_path = f"/var/lib/bagua/node/jobs/{run.job_id}/rank-{rank.rank}.log"
        await self._say(node_pb2.NodeFact(job=job))
        self._counts.started += 1
        self._counts.last_started_at = time.monotonic()
        if run.spec.entry == TRIVIAL:
            await self._end(job, signal=0)
            self._counts.finished += 1

    async def _regroup(self, job, run):
        """Members are known by their numbers, so nobody needs to know the others' ranks here. A step takes no time."""
        job.generation = run.generation
        if not run.hold:
            job.entered = run.generation
        left = [rank for rank in job.ranks if rank.state != common_pb2.RANK_STATE_EXITED]
        del job.ranks[:]
        job.ranks.extend(left)
        self._counts.regrouped += 1
        self._counts.last_regrouped_at = time.monotonic()
        await self._say(node_pb2.NodeFact(job=job))

    async def kill_rank(self):
        """The first rank of the first job dies."""
        job = next(iter(self._held.values()))
        job.ranks[0].state = common_pb2.RANK_STATE_EXITED
        job.ranks[0].signal, job.ranks[0].exit_code, job.ranks[0].exited_at = 9, -9, time.time()
        self._counts.killed_at = time.monotonic()
        await self._say(node_pb2.NodeFact(job=job))

    async def _stop(self, stop):
        job = self._held.get(stop.job_id)
        if job is None:
            job = node_pb2.LocalJob(job_id=stop.job_id, generation=stop.generation)
        await self._end(job, signal=15)
        self._counts.stopped += 1
        self._counts.last_stopped_at = time.monotonic()

    async def _end(self, job, signal):
        job.phase = node_pb2.LOCAL_PHASE_STOPPED
        for rank in job.ranks:
            if rank.state != common_pb2.RANK_STATE_EXITED:
                rank.state, rank.signal, rank.exit_code = common_pb2.RANK_STATE_EXITED, signal, -signal
                rank.exited_at = time.time()
        await self._say(node_pb2.NodeFact(job=job))


def _channel(address, tls):
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=_OPTIONS)


async def keep(daemon, address, token, tls, turn, counts):
    """Keeps a daemon connected, as a real one would."""
    while True:
        async with _channel(address, tls) as channel:
            async with turn:
                await channel.channel_ready()
            try:
                await daemon.session(channel, token)
            except grpc.aio.AioRpcError as error:
                counts.errors = [*counts.errors[-4:], error.details() or str(error.code())]
            except asyncio.InvalidStateError as error:  # grpc.aio: the call ended under a write
                counts.errors = [*counts.errors[-4:], str(error)]
        counts.broken += 1
        await asyncio.sleep(random.uniform(0.1, 1.0))


async def serve(address, token, hosts, slots, tls=""):
    """Runs the daemons; answers each line on stdin with the counts as a line of JSON, until stdin ends. A line with a
    number kills a rank of that daemon. ``tls``: a folder of certificates; empty: none."""
    counts = Counts()
    turn = asyncio.Semaphore(CONNECTING)
    daemons = [Daemon(f"node-{number:04}", slots, counts) for number in range(hosts)]
    files = TlsFiles.in_folder(Path(tls)) if tls else None
    tasks = [asyncio.create_task(keep(daemon, address, token, files, turn, counts)) for daemon in daemons]
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        if line.strip():
            await daemons[int(line)].kill_rank()
        print(json.dumps(asdict(counts)), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class FleetProcess:
    """``hosts`` daemons with ``slots`` slots each, in one child process. ``tls``: a folder of certificates."""

    def __init__(self, address, token, hosts, slots, tls=""):
        arguments = json.dumps({"address": address, "token": token, "hosts": hosts, "slots": slots, "tls": tls})
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._write(arguments)
        self._hosts = hosts

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.close()

    def kill_rank(self, daemon):
        """Kills a rank of the only, elastic job on that daemon."""
        return self.counts(str(daemon))

    def counts(self, command=""):
        self._write(command)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the simulated daemons have ended")
        return Counts(**json.loads(line))

    def wait_connected(self, deadline_s=WAIT_S):
        """Returns when every daemon has its Welcome. Raises TimeoutError."""
        self.wait(lambda counts: counts.connected == self._hosts, deadline_s, "daemons are not connected")

    def wait(self, done, deadline_s, what):
        """The counts, as soon as ``done(counts)``. Raises TimeoutError."""
        deadline = time.monotonic() + deadline_s
        while not done(counts := self.counts()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what} after {deadline_s:g} s: {counts}")
            time.sleep(0.01)
        return counts

    def close(self):
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(WAIT_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    def _write(self, line):
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


if __name__ == "__main__":
    with open(0, "rb", buffering=0, closefd=False) as first:  # what comes after the first line is for the event loop
        arguments = json.loads(first.readline())
    asyncio.run(serve(**arguments))
