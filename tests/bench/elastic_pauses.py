#!/usr/bin/env python3
"""How long the ranks that are left pause when somebody is lost, a daemon dies, or somebody joins.

    python tests/bench/elastic_pauses.py                                     # all rows, ten times each
    python tests/bench/elastic_pauses.py --rows rank,join --times 3 --megabytes 20 --output json

A pause is the longest time between two steps of a rank that is left, of the slowest such rank, less the median time of
a step before. The rows, each on a cluster of its own on this machine:

    rank     SIGKILL of 1 of 4 ranks of a host
    daemon   SIGKILL of the daemon proper, below its keeper, on that host
    join     a new rank takes the place of the one that was killed, less the state at 70 % of --line-rate
    host     SIGKILL of the keeper of 1 of 3 hosts with one rank each
    silent   1 of 3 hosts is stopped with all of its processes, less the limit of 5 s (docs/elastic.md)
    coordinator  SIGKILL of the coordinator, which is away for 4 s. Two more rows take turns with it, 4 s each:
             "restart", in which it is started on the same processors, and "undisturbed", in which nothing happens
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bagua.base.daemon_process import daemon_pid
from bagua.base.security import read_token
from bagua.cli.embedded import START_DEADLINE_S, STOP_DEADLINE_S, ServiceProcess
from bagua.client import Client
from bagua.daemon.node.keeper import MAX_DEATHS
from bagua.proto import common_pb2

sys.path.insert(0, str(Path(__file__).parent))

from elastic_peers import Step, read

RANK_MAIN = Path(__file__).with_name("elastic_rank.py")
ON_ONE_HOST, BETWEEN_HOSTS, ABOVE = ("rank", "daemon", "join"), ("host", "silent"), ("coordinator",)
ROWS = (*ON_ONE_HOST, *BETWEEN_HOSTS, *ABOVE)
TARGETS = {"rank": (0.3, 1.0), "host": (0.3, 1.0), "silent": (0.5, 1.5), "daemon": (1.5, 3.0), "join": (0.2, 1.0)}
"""Seconds: median, 99 of 100."""
TURN_S = 4.0
SILENCE_S = 5.0
DAEMON_DEATHS = MAX_DEATHS - 1
"""Of one daemon. At the next one its keeper would give up: so many within a minute mean that the daemon is broken."""
STEPS = 8
"""Of all ranks, before an event and after it."""
WITHIN_S = 120.0


def pause(diaries: Sequence[Sequence[Step]], began: float, ended: float) -> float:
    """Seconds of these ranks, between two monotonic times, beyond a step of theirs before."""
    usual, longest = [], 0.0
    for diary in diaries:
        for earlier, later in itertools.pairwise(diary):
            if later.at <= began:
                usual.append(later.at - earlier.at)
            elif earlier.at < ended:
                longest = max(longest, later.at - earlier.at)
    return max(0.0, longest - statistics.median(usual[-50:]))


class Rig:
    """A coordinator, nodes, and a job on them that trains. Leaving the context ends all of it."""

    def __init__(self, state: Path, slots: int, megabytes: int, heap: int) -> None:
        self.nodes: dict[str, ServiceProcess] = {}
        self._state, self._slots, self._megabytes, self._heap = state, slots, megabytes, heap
        self._all: list[ServiceProcess] = []
        self._diaries = state / "diaries"
        self._diaries.mkdir()
        self._nodes_wanted = 0
        self._job = ""
        self._address = "127.0.0.1:0"
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """At the address that it has had, if there was one before."""
        database = f"sqlite:///{self._state / 'bagua.db'}"
        place = ["--listen", self._address, "--state-dir", str(self._state), "--database-url", database]
        label = f"coordinator-{len(self._all)}"
        self.coordinator = self._launch(label, "bagua.daemon.coordinator", [*place, "--fence-after", "10"])
        self._address = self.coordinator.wait_ready(time.monotonic() + START_DEADLINE_S)["address"]

    def _launch(self, label: str, module: str, arguments: list[str]) -> ServiceProcess:
        service = ServiceProcess(label, module, arguments, self._state / f"{label}.log")
        self._all.append(service)
        return service

    def start_nodes(self, wanted: int) -> None:
        self._nodes_wanted = wanted
        while len(self.nodes) < wanted:
            name = f"node-{len(self._all)}"
            arguments = ["--name", name, "--node-id", name, "--slots", str(self._slots), "--pass-env", "*"]
            reach = ["--coordinator", self._address, "--token-file", str(self._state / "token")]
            service = self._launch(name, "bagua.daemon.node", [*arguments, *reach, "--state-dir", str(self._state)])
            service.wait_ready(time.monotonic() + START_DEADLINE_S)
            self.nodes[name] = service

    def start_job(self) -> None:
        spec = common_pb2.JobSpec(
            name="pauses",
            entry=str(RANK_MAIN),
            args=["bagua", str(self._diaries), str(self._megabytes), "10", str(self._heap)],
            env={"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
            workdir=str(self._state),
            nnodes=self._nodes_wanted,
            nproc_per_node=self._slots,
            elastic=True,
            min_nodes=1,
            max_nodes=self._nodes_wanted,
            respawn=1000,
            python=sys.executable,
            placement_timeout_s=60.0,
            stop_grace_s=1.0,
        )
        with self._client() as client:
            self._job = client.submit(spec).job_id
        self.await_whole()

    def _client(self) -> Client:
        return Client(self._address, token=read_token(self._state / "token"))

    def ranks(self) -> dict[int, str]:
        """Members that train: their pids, and the nodes that they are on."""
        with self._client() as client:
            job = client.get(self._job)
        found = read(self._diaries)
        known = {rank.pid: rank.node_id for rank in job.ranks if rank.node_id in self.nodes}
        return {pid: node for pid, node in known.items() if found.get(pid) and Path(f"/proc/{pid}").exists()}

    def await_whole(self) -> None:
        """Until all ranks that are wanted have trained together for some steps."""
        wanted = self._nodes_wanted * self._slots

        def whole() -> bool:
            found = read(self._diaries)
            pids = self.ranks()
            together = [sum(step.ranks == wanted for step in found[pid][-STEPS:]) for pid in pids]
            return len(pids) == wanted and min(together) == STEPS

        until(whole, f"{wanted} ranks train together", lambda: str(self.ranks()))

    def pause_of(self, left: Sequence[int], began: float) -> float:
        """Of these ranks, once they have made some more steps."""

        def go_on() -> bool:
            found = read(self._diaries)
            return all(sum(step.at > began for step in found[pid]) >= STEPS for pid in left)

        until(go_on, "the ranks that are left go on", lambda: str(self.ranks()))
        found = read(self._diaries)
        return pause([found[pid] for pid in left], began, time.monotonic())

    def turn(self, pids: Sequence[int], event: Callable[[], None]) -> float:
        """Their pause in a time that begins with the event."""
        began = time.monotonic()
        event()
        time.sleep(max(0.0, began + TURN_S - time.monotonic()))
        found = read(self._diaries)
        return pause([found[pid] for pid in pids], began, time.monotonic())

    def join_of(self, left: Sequence[int], began: float) -> float:
        """Their pause, when all ranks are there again: around the first step with more ranks than before it."""
        self.await_whole()
        found = read(self._diaries)
        grown = [
            (earlier.at, later.at)
            for pid in left
            for earlier, later in itertools.pairwise(found[pid])
            if later.at > began and later.ranks > earlier.ranks
        ]
        first, last = min(earlier for earlier, _ in grown), max(later for _, later in grown)
        return pause([found[pid] for pid in left], first, last)

    def end(self) -> None:
        with contextlib.suppress(Exception), self._client() as client:
            client.cancel(self._job, reason="measured")
        for service in self._all:
            service.signal_group(signal.SIGCONT)
        deadline = time.monotonic() + STOP_DEADLINE_S
        for service in reversed(self._all):
            service.signal_group(signal.SIGTERM)
        for service in self._all:
            service.wait(deadline)


def until(condition: Callable[[], bool], what: str, state: Callable[[], str]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {WITHIN_S:g} s: {what} ({state()})")
        time.sleep(0.05)


@contextlib.contextmanager
def rig(nodes: int, slots: int, options: argparse.Namespace) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="bagua-pauses-") as folder:
        made = Rig(Path(folder), slots, options.megabytes, options.heap)
        try:
            made.start_nodes(nodes)
            made.start_job()
            yield made
        finally:
            made.end()


def on_one_host(options: argparse.Namespace, tell: Callable[[str, float], None]) -> None:
    for done in range(0, options.times, DAEMON_DEATHS):
        on_a_new_cluster(min(DAEMON_DEATHS, options.times - done), options, tell)


def on_a_new_cluster(times: int, options: argparse.Namespace, tell: Callable[[str, float], None]) -> None:
    with rig(1, options.ranks, options) as made:
        for _ in range(times):
            if "daemon" in options.rows:
                began = time.monotonic()
                os.kill(daemon_pid(next(iter(made.nodes.values())).process.pid), signal.SIGKILL)
                tell("daemon", made.pause_of(list(made.ranks()), began))
            if "rank" in options.rows or "join" in options.rows:
                victim, *left = sorted(made.ranks())
                began = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                tell("rank", made.pause_of(left, began))
                joined = made.join_of(left, began)
                tell("join", joined - options.megabytes * 8e-3 / (0.7 * options.line_rate))


def between_hosts(options: argparse.Namespace, tell: Callable[[str, float], None]) -> None:
    with rig(options.hosts, 1, options) as made:
        for _, row in itertools.product(range(options.times), BETWEEN_HOSTS):
            if row not in options.rows:
                continue
            ranks = made.ranks()
            victim, node = sorted(ranks.items())[0]
            left = [pid for pid in ranks if pid != victim]
            service = made.nodes.pop(node)
            daemon, began = daemon_pid(service.process.pid), time.monotonic()
            if row == "host":
                service.process.kill()
                tell(row, made.pause_of(left, began))
            else:
                for pid in (service.process.pid, daemon, victim):
                    os.kill(pid, signal.SIGSTOP)
                tell(row, made.pause_of(left, began) - SILENCE_S)
                for pid in (victim, daemon, service.process.pid):
                    os.kill(pid, signal.SIGKILL)
            made.start_nodes(options.hosts)
            made.await_whole()


def without_the_coordinator(options: argparse.Namespace, tell: Callable[[str, float], None]) -> None:
    with rig(1, options.ranks, options) as made:
        pids = list(made.ranks())
        for _ in range(options.times):
            tell("undisturbed", made.turn(pids, lambda: None))
            tell("coordinator", made.turn(pids, made.coordinator.process.kill))
            tell("restart", made.turn(pids, made.start_coordinator))


def most(times: Sequence[float]) -> float:
    """99 of 100 are at most this: of fewer the longest."""
    return sorted(times)[min(len(times) - 1, int(0.99 * len(times)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help="with commas")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=100, help="of gradients")
    parser.add_argument("--heap", type=int, default=0, help="MB of memory that each rank uses besides")
    parser.add_argument("--line-rate", type=float, default=10.0, help="Gbit/s")
    parser.add_argument("--output", choices=("table", "json"), default="table")
    options = parser.parse_args()
    options.rows = options.rows.split(",")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # ends all that was started here
    found: dict[str, list[float]] = {}

    def tell(row: str, seconds: float) -> None:
        found.setdefault(row, []).append(max(0.0, seconds))
        print(f"{row}: {seconds * 1e3:.0f} ms", file=sys.stderr, flush=True)

    if set(options.rows) & set(ON_ONE_HOST):
        on_one_host(options, tell)
    if set(options.rows) & set(BETWEEN_HOSTS):
        between_hosts(options, tell)
    if set(options.rows) & set(ABOVE):
        without_the_coordinator(options, tell)
    if options.output == "json":
        about = {"unit": "s beyond a step", "megabytes": options.megabytes, "system": platform.platform()}
        print(json.dumps({**about, "rows": {row: sorted(times) for row, times in found.items()}}))
        return 0
    print(f"{'row':<12}{'median':>10}{'99 %':>10}{'wanted':>16}{'times':>8}   ({options.megabytes} MB)")
    for row, times in found.items():
        wanted = " / ".join(f"{seconds:g}" for seconds in TARGETS.get(row, ()))
        print(f"{row:<12}{statistics.median(times):>8.3f} s{most(times):>8.3f} s{wanted:>14} s{len(times):>8}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
