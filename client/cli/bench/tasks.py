"""Runs the program of a benchmark as a job on an embedded cluster, on this machine or in emulated networks.

In an emulated network everything but the waiting for it happens in a process of its own inside the first namespace
(``python -m bagua.cli.bench.tasks TASK``), because a coordinator there can't be reached from outside.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from bagua.base.errors import BaguaError, ServiceError
from bagua.base.parent_process import die_with_parent
from bagua.bench.emulation import DEVICE, Emulation, addresses
from bagua.bench.units import RESULT_MARK
from bagua.cli.cluster.local_cluster import EmbeddedCluster, EmbeddedHost
from bagua.tuning.network import Network

if TYPE_CHECKING:
    from bagua.cli.display.terminal import Terminal
    from bagua.proto import common_pb2

CANCEL_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Task:
    """Job of a benchmark: a module of ``bagua.bench.ranks``, or a file, with its configuration, and where it runs.

    ``namespaces``: of the hosts of an emulated network; none: node daemons on this machine's loopback.
    """

    module: str
    config: dict[str, Any]
    nnodes: int
    nproc_per_node: int
    env: dict[str, str] = field(default_factory=dict)
    quiet: bool = False
    namespaces: Sequence[str] = ()
    result: str = ""

    def spec(self) -> common_pb2.JobSpec:
        from bagua.cli.run import local_spec

        threads = str(self.config.get("threads", 1))
        # The peer warns of addresses without names.
        env = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": threads, **self.env}
        if self.namespaces:
            env["GLOO_SOCKET_IFNAME"] = DEVICE  # Gloo goes by the host's name, which means no address in a namespace
        return local_spec(
            self.module,
            module=not self.module.endswith(".py"),
            name=f"bench {re.split('[./]', self.module.removesuffix('.py'))[-1]}",
            args=[json.dumps(self.config), self.result],
            env=env,
            workdir=tempfile.gettempdir(),
            nnodes=self.nnodes,
            nproc_per_node=self.nproc_per_node,
            island_size=self.config.get("island_size", 1),
        )


class NamespaceCluster(EmbeddedCluster):
    """A cluster whose hosts are namespaces of an emulated network. This process is in the first of them."""

    def __init__(self, state: Path, namespaces: Sequence[str]) -> None:
        super().__init__(state)
        self._places = addresses(len(namespaces))
        self._hosts = [
            EmbeddedHost(("ip", "netns", "exec", name), address)
            for name, address in zip(namespaces, self._places, strict=True)
        ]

    def start_coordinator(self, *arguments: str, listen: str = "") -> None:
        # Beyond loopback the service demands TLS.
        first = self._places[0]
        super().start_coordinator("--auto-tls", first, *arguments, listen=listen or f"{first}:0")

    def start_nodes(
        self, node_ids: Sequence[str], slots: int, *arguments: str, hosts: Sequence[EmbeddedHost] = ()
    ) -> None:
        super().start_nodes(node_ids, slots, *arguments, hosts=hosts or self._hosts)


def run_task(task: Task) -> int:
    """Starts a cluster, runs the job, stops everything; returns the exit code (130 after Ctrl-C). Rank 0's results are
    in ``task.result`` then. Raises BaguaError."""
    from bagua.cli.run import RunOptions, run_embedded
    from bagua.client.describe import SUCCEEDED, summary

    started = time.monotonic()
    spaces = task.namespaces
    cluster = (lambda state: NamespaceCluster(state, spaces)) if spaces else None
    options = RunOptions(task.spec(), quiet=task.quiet, aside=True, cluster=cluster, reported=False)
    ended = run_embedded(options, restarts_left=0)
    if ended.job is not None and not ended.interrupted and ended.job.state != SUCCEEDED:
        raise ServiceError(f"{summary(ended.job, time.monotonic() - started)} [BG001]")
    return ended.code


def measure(
    task: Task, network: Network | None, emulation: Callable[[Network, int], Emulation] = Emulation
) -> dict[str, Any]:
    """Results of rank 0; in an emulated network if there is one. Ends the program after Ctrl-C. Raises BaguaError."""
    with tempfile.TemporaryDirectory(prefix="bagua-bench-") as folder:
        result = Path(folder) / "result.json"
        task = replace(task, result=str(result))
        if network is None:
            code = run_task(task)
        else:
            with ending_signals(), emulation(network, task.nnodes) as made:
                code = _run_inside(replace(task, namespaces=made.names), Path(folder) / "task.json")
        if code:
            raise typer.Exit(code)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def measure_on_cluster(
    make: Callable[[int], Task], nnodes: int | None, reach: tuple[str | None, Path | None, Path | None]
) -> tuple[dict[str, Any], dict[int, str]]:
    """Runs a job on a service that runs, with so many nodes (None: all that are connected). Returns what rank 0
    printed, and the node of each rank. Ctrl-C cancels the job. Raises BaguaError.
    """
    from bagua.cli.command import connected
    from bagua.cli.display.follow import Follower, Interrupted
    from bagua.cli.display.terminal import open_terminal
    from bagua.client.describe import SUCCEEDED, summary

    with connected(*reach) as client:
        there = sum(node.connected for node in client.nodes())
        if (nnodes or there) < 2:
            raise ServiceError(f"{there} node daemons are connected: pairs need two or more. [BG001]")
        task = make(nnodes or there)
        spec = task.spec()
        spec.python, spec.workdir = "", "/"  # those of the daemons
        started = time.monotonic()
        job = client.submit(spec)
        catcher = ResultCatcher(open_terminal(task.quiet, aside=True))

        def cancel() -> float:
            client.cancel(job.job_id, reason="stopped by the user")
            return CANCEL_PATIENCE_S

        follower = Follower(client, job, catcher.terminal, cancel)
        signal.signal(signal.SIGINT, lambda *_: follower.post(Interrupted()))
        try:
            job = follower.run()
        finally:
            catcher.terminal.close()
        if job.state != SUCCEEDED:
            raise ServiceError(f"{summary(job, time.monotonic() - started)} [BG001]")
        return catcher.result(), {rank.rank: rank.node_id for rank in job.ranks}


class ResultCatcher:
    """Takes rank 0's result out of the lines that go to a terminal."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._found = ""
        self._show = terminal.line
        terminal.line = self._line  # type: ignore[method-assign]

    def _line(self, text: str) -> None:
        _, mark, result = text.partition(RESULT_MARK)
        if mark:
            self._found = result
        else:
            self._show(text)

    def result(self) -> dict[str, Any]:
        """The document. Raises ServiceError if none came."""
        if not self._found:
            raise ServiceError(
                "The job succeeded, but its result did not arrive with its output. Run it again. [BG001]"
            )
        found: dict[str, Any] = json.loads(self._found)
        return found


@contextmanager
def ending_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP leave through the context managers, so that namespaces are removed."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_inside(task: Task, file: Path) -> int:
    """Runs the task in a process of the first namespace; signals are passed on to it. Returns its exit code."""
    file.write_text(json.dumps(asdict(task)))
    command = [
        "ip",
        "netns",
        "exec",
        task.namespaces[0],
        sys.executable,
        "-P",
        "-m",
        "bagua.cli.bench.tasks",
        str(file),
    ]
    # A session of its own: a Ctrl-C at the terminal reaches it through us, once.
    process = subprocess.Popen(command, start_new_session=True)

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)
    try:
        return process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main() -> None:
    """The process inside the first namespace."""
    die_with_parent(signal.SIGTERM)
    document = json.loads(Path(sys.argv[1]).read_text())
    try:
        sys.exit(run_task(Task(**document)))
    except BaguaError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
