"""Real ranks on a real engine: the part of a node daemon that ranks need, in the test's process.

The whole daemon is tested beside this (integration/node); here the engine's host is the test, so that faults can be
made and hosts multiplied without a coordinator.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import torch

from bagua import csrc
from bagua.base import islands
from bagua.proto import common_pb2, rank_pb2
from bagua.proto.rank_pb2_grpc import RankServiceServicer, add_RankServiceServicer_to_server
from rig.engines import open_engine, open_lobby
from rig.ranks import forking
from rig.ranks.regrouping import Regrouper

STACKS_S = 1.0
"""For ranks to write down their stacks."""
HANG_S = 240.0
"""After which ranks hang. The first of a file may wait a minute for the import of torch on a machine with much else."""
Answer = Callable[[common_pb2.TuneRequest], common_pb2.TuneReply]
"""The coordinator's answers to jobs that tune themselves."""


class EngineHost(RankServiceServicer):
    """One host of a job: its engine, and the service that ranks join through."""

    def __init__(self, folder, hosts, index, memory_limit=0, regrouper=None, newcomers=()):
        """``regrouper``: the job is elastic. ``newcomers``: the host has these members alone."""
        self.hosts = [list(ranks) for ranks in hosts]
        self.index = index
        self.folder = folder
        self.socket = str(folder / f"rank-{index}.sock")
        self.data_socket = str(folder / f"data-{index}.sock")
        self.tokens = {member: os.urandom(32) for member in newcomers or hosts[index]}
        self.takes_newcomers = []
        self.tune = None
        self.progress = []
        self.told = []
        self.regrouper = regrouper
        self.engine = (
            open_lobby(csrc.load(), newcomers, self.data_socket, self.tokens)
            if newcomers
            else open_engine(
                csrc.load(),
                self.hosts,
                index,
                self.data_socket,
                self.tokens,
                memory_limit=memory_limit,
                elastic=regrouper is not None,
            )
        )
        if regrouper is not None:
            regrouper.engines[index] = self.engine
        self._stop_read, self._stop_write = os.pipe()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        add_RankServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def _watch(self):
        """A rank that is lost ends the job, as the node daemon does it. In an elastic job the others go on."""
        ready = select.poll()  # select() takes no descriptors from 1024 on
        ready.register(self.engine.event_fd(), select.POLLIN)
        ready.register(self._stop_read, select.POLLIN)
        while self._stop_read not in (descriptor for descriptor, _ in ready.poll()):
            for event in self.engine.events():
                self.told.append(event)
                if self.regrouper is not None:
                    self.regrouper.take(self.index, event)
                elif event["kind"] == "lost":
                    self.engine.abort(event["text"])  # may come before the engine's own error, which says the same

    def Join(self, request, context):
        if request.rank not in self.tokens:
            context.abort(grpc.StatusCode.NOT_FOUND, f"rank {request.rank} is not on this node")
        return rank_pb2.JoinReply(
            generation=1,
            world_size=sum(len(ranks) for ranks in self.hosts),
            hosts=[rank_pb2.Host(node_id=f"node-{i}", ranks=ranks) for i, ranks in enumerate(self.hosts)],
            data_socket=self.data_socket,
            data_token=self.tokens[request.rank],
        )

    def ReportProgress(self, request, context):
        self.progress.append(request)
        return rank_pb2.ReportProgressReply()

    def TakesNewcomers(self, request, context):
        self.takes_newcomers.append(request.rank)
        return rank_pb2.TakesNewcomersReply()

    def Tune(self, request, context):
        if self.tune is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator is away")
        return self.tune(request)

    def DescribeWaits(self, request, context):
        return rank_pb2.DescribeWaitsReply(waiting=self.engine.waiting(0.0))

    def close(self):
        os.write(self._stop_write, b"x")
        self._watcher.join()
        self._server.stop(0).wait()
        self._pool.shutdown()
        self.engine.close()
        os.close(self._stop_read)
        os.close(self._stop_write)


@dataclass
class RankProcess:
    """A rank that was started."""

    rank: int
    process: subprocess.Popen[bytes] | forking.ForkedProcess
    log: Path
    result_file: Path

    @property
    def output(self):
        return self.log.read_text()

    def result(self):
        """Returns the result of the rank's function; fails the test with the rank's output if it did not end well."""
        assert self.process.returncode == 0, f"rank {self.rank}: exit code {self.process.returncode}\n{self.output}"
        return torch.load(self.result_file, weights_only=False)


@dataclass
class Ranks:
    """Starts ranks and ends them."""

    folder: Path
    hosts: list[EngineHost] = field(default_factory=list)
    started: list[RankProcess] = field(default_factory=list)
    regrouper: Regrouper | None = None
    tune: Answer | None = None
    preload: tuple[str, ...] = ()
    """Modules that the process has imported which forks the ranks."""

    def start(
        self, function, nprocs=None, hosts=None, environment=None, memory_limits=None, elastic=False, **arguments
    ):
        """One process for each rank, all of which run ``function(**arguments)`` of the test's file. ``memory_limits``:
        bytes of shared memory of each host, 0: all there is. ``elastic``: the job goes on without ranks that are
        killed."""
        layout = [list(ranks) for ranks in hosts] if hosts else [list(range(nprocs or 2))]
        limits = memory_limits or [0] * len(layout)
        size = islands.size_in(environment or {})
        self.regrouper = Regrouper(layout, size, self._end) if elastic else None
        self.hosts = [
            EngineHost(self.folder, layout, index, limit, self.regrouper) for index, limit in enumerate(limits)
        ]
        for host in self.hosts:
            host.tune = self.tune
        if len(layout) > 1:
            for host in self.hosts:
                host.engine.set_peers([other.engine.address() for other in self.hosts])
        for host in self.hosts:
            for local_rank, rank in enumerate(layout[host.index]):
                self.started.append(self._start_rank(function, host, rank, local_rank, environment or {}, arguments))
        return self.started

    def _end(self, members):
        """Kills ranks that are out, as their daemon does."""
        for one in self.started:
            if one.rank in members:
                one.process.send_signal(signal.SIGKILL)

    def join(self, function, members, host=0, environment=None, **arguments):
        """Starts newcomers on a host, which may be a new one. They are let in when all are ready."""
        assert self.regrouper is not None
        if host == len(self.hosts):
            self.hosts.append(EngineHost(self.folder, [], host, 0, self.regrouper, members))
        else:
            tokens = {member: os.urandom(32) for member in members}
            self.hosts[host].tokens |= tokens
            self.hosts[host].engine.open_lobby(members=list(members), tokens=tokens)
        self.regrouper.joining.setdefault(host, []).extend(members)
        made = [
            self._start_rank(function, self.hosts[host], member, local_rank, environment or {}, arguments, len(members))
            for local_rank, member in enumerate(members)
        ]
        self.started += made
        return made

    def _start_rank(self, function, host, rank, local_rank, environment, arguments, newcomers=0):
        variables = {
            "RANK": rank,
            "WORLD_SIZE": newcomers or sum(len(ranks) for ranks in host.hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": newcomers or len(host.hosts[host.index]),
            "NODE_RANK": host.index,
            "BAGUA_JOB_ID": "test",
            "BAGUA_DAEMON_SOCKET": host.socket,
            "PYTHONUNBUFFERED": 1,
            "OMP_NUM_THREADS": 1,
        }
        log, result_file = self.folder / f"rank-{rank}.log", self.folder / f"rank-{rank}.pt"
        command = [
            forking.RANK_MAIN,
            function.__code__.co_filename,
            function.__name__,
            result_file,
            json.dumps(arguments),
        ]
        argv = [str(word) for word in command]
        whole = {**os.environ, **{name: str(value) for name, value in variables.items()}, **environment}
        with log.open("wb") as output:
            server = forking.server(*self.preload)
            forked = server.fork(argv, whole, output.fileno()) if forking.can_fork(environment) else None
            process = forked or subprocess.Popen(
                [sys.executable, *argv], env=whole, stdout=output, stderr=output, start_new_session=True
            )
        return RankProcess(rank, process, log, result_file)

    def wait(self, deadline_s=HANG_S):
        """Waits for all ranks; the test fails, with their output and who waits for whom, if they don't end in time."""
        deadline = time.monotonic() + deadline_s
        for rank in self.started:
            try:
                rank.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.ask_where_they_are()
                waits = "\n".join(host.engine.waiting(0.0) for host in self.hosts)
                outputs = "\n".join(f"rank {one.rank}: {one.output}" for one in self.started)
                pytest.fail(f"rank {rank.rank} did not end in {deadline_s} s\nwaiting: {waits}\n{outputs}")

    def ask_where_they_are(self):
        """The stacks of all threads of ranks that have not ended come into their outputs."""
        for rank in self.started:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(signal.SIGUSR2)
        time.sleep(STACKS_S)

    def run(self, function, nprocs=None, **options):
        """Starts the ranks and returns what their functions returned, in the order of ranks."""
        self.start(function, nprocs, **options)
        self.wait()
        failed = [one for one in self.started if one.process.returncode]
        if failed:
            pytest.fail("\n".join(f"rank {one.rank}: {one.process.returncode}\n{one.output}" for one in failed))
        return [rank.result() for rank in self.started]

    def survive(self, function, lost, nprocs=None, **options):
        """Starts an elastic job whose members ``lost`` are killed; returns what the others' functions returned."""
        self.start(function, nprocs, elastic=True, **options)
        return self.left(lost)

    def left(self, lost=(), code=-9):
        """Waits for the end of all, of ``lost`` with this code; returns what the others' functions returned."""
        self.wait()
        outputs = "\n".join(f"rank {one.rank}: {one.process.returncode}\n{one.output}" for one in self.started)
        for one in self.started:
            assert one.process.returncode == (code if one.rank in lost else 0), outputs
        return [one.result() for one in self.started if one.rank not in lost]

    def close(self):
        for rank in self.started:
            if rank.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
                rank.process.wait()
        for host in self.hosts:
            host.close()
        self.started, self.hosts = [], []


@contextlib.contextmanager
def make_ranks(folder, preload=()):
    """Ranks whose engines and files live in ``folder``; whatever is left is killed at the end."""
    made = Ranks(folder, preload=preload)
    try:
        yield made
    finally:
        made.close()
