"""Parts of ``elastic_pauses.py`` and ``elastic_peers.py``: diaries of ranks, and a cluster of Bagua here."""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bagua.base.security import read_token
from bagua.cli.cluster.local_cluster import START_DEADLINE_S, STOP_DEADLINE_S, ServiceProcess
from bagua.client import Client
from bagua.proto import common_pb2

RANK_MAIN = Path(__file__).with_name("elastic_rank.py")
STEPS = 8
"""Of all ranks, before an event and after it."""
WITHIN_S = 120.0
SILENCE_S = 5.0
"""A host of Bagua that is silent for as long is out (docs/elastic.md)."""


class Unmeasured(Exception):
    """A system did not do it; the words say what is missing."""


@dataclass(frozen=True)
class Step:
    """A line of a rank's diary. ``at``: seconds of the monotonic clock."""

    at: float
    number: int
    ranks: int
    tried: int


def read(folder):
    """The diaries: pid -> its steps."""
    found = {}
    for path in folder.glob("steps-*"):
        lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[int(path.name.removeprefix("steps-"))] = [
            Step(int(at) / 1e9, int(number), int(ranks), int(tried)) for at, number, ranks, tried in lines
        ]
    return found


def pause(diaries, began, ended):
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
    """A coordinator, nodes of so many slots, and a job on them that trains: ``arguments`` of elastic_rank.py.

    ``end`` ends all of it.
    """

    def __init__(self, state, slots, diaries, arguments, island_size=1):
        self.nodes = {}
        self._state, self._slots, self._island_size = state, slots, island_size
        self._diaries, self._arguments = diaries, arguments
        self._all = []
        self._nodes_wanted = 0
        self._job = ""
        self._address = "127.0.0.1:0"
        self.start_coordinator()

    def start_coordinator(self):
        """At the address that it has had, if there was one before."""
        database = f"sqlite:///{self._state / 'bagua.db'}"
        place = ["--listen", self._address, "--state-dir", str(self._state), "--database-url", database]
        label = f"coordinator-{len(self._all)}"
        self.coordinator = self._launch(label, "bagua.daemon.coordinator", [*place, "--fence-after", "10"])
        self._address = self.coordinator.wait_ready(time.monotonic() + START_DEADLINE_S)["address"]

    def _launch(self, label, module, arguments):
        service = ServiceProcess(label, module, arguments, self._state / f"{label}.log")
        self._all.append(service)
        return service

    def start_nodes(self, wanted):
        self._nodes_wanted = wanted
        while len(self.nodes) < wanted:
            name = f"node-{len(self._all)}"
            arguments = ["--name", name, "--node-id", name, "--slots", str(self._slots), "--pass-env", "*"]
            reach = ["--coordinator", self._address, "--token-file", str(self._state / "token")]
            service = self._launch(name, "bagua.daemon.node", [*arguments, *reach, "--state-dir", str(self._state)])
            service.wait_ready(time.monotonic() + START_DEADLINE_S)
            self.nodes[name] = service

    def start_job(self, *, most=0, respawn=1000):
        """On all nodes. ``most``: it grows onto so many, when there are more. ``respawn``: replaces so many ranks."""
        spec = common_pb2.JobSpec(
            name="pauses",
            entry=str(RANK_MAIN),
            args=["bagua", str(self._diaries), *self._arguments],
            env={"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "BAGUA_ISLAND_SIZE": str(self._island_size)},
            workdir=str(self._state),
            nnodes=self._nodes_wanted,
            nproc_per_node=self._slots,
            elastic=True,
            min_nodes=1,
            max_nodes=most or self._nodes_wanted,
            respawn=respawn,
            python=sys.executable,
            placement_timeout_s=60.0,
            stop_grace_s=1.0,
        )
        with self._client() as client:
            self._job = client.submit(spec).job_id

    def _client(self):
        return Client(self._address, token=read_token(self._state / "token"))

    def ranks(self):
        """Members that train, the lowest rank first: their pids, and the nodes that they are on."""
        with self._client() as client:
            job = client.get(self._job)
        found = read(self._diaries)
        ranks = sorted(job.ranks, key=lambda rank: rank.rank)
        known = {rank.pid: rank.node_id for rank in ranks if rank.node_id in self.nodes}
        return {pid: node for pid, node in known.items() if found.get(pid) and Path(f"/proc/{pid}").exists()}

    def islands(self):
        """The pids of each island, where all ranks are there."""
        pids, size = list(self.ranks()), self._island_size
        return [pids[begin : begin + size] for begin in range(0, len(pids), size)]

    def await_whole(self):
        """Until all ranks that are wanted have trained together for some steps."""
        wanted = self._nodes_wanted * self._slots

        def whole():
            found = read(self._diaries)
            pids = self.ranks()
            together = [sum(step.ranks == wanted for step in found[pid][-STEPS:]) for pid in pids]
            return len(pids) == wanted and min(together) == STEPS

        until(whole, f"{wanted} ranks train together", lambda: str(self.ranks()))

    def pause_of(self, left, began):
        """Of these ranks, once they have made some more steps."""

        def go_on():
            found = read(self._diaries)
            return all(sum(step.at > began for step in found[pid]) >= STEPS for pid in left)

        until(go_on, "the ranks that are left go on", lambda: str(self.ranks()))
        found = read(self._diaries)
        return pause([found[pid] for pid in left], began, time.monotonic())

    def turn(self, pids, event, seconds):
        """Their pause in so many seconds, which begin with the event."""
        began = time.monotonic()
        event()
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        found = read(self._diaries)
        return pause([found[pid] for pid in pids], began, time.monotonic())

    def join_of(self, left, began):
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

    def end(self):
        with contextlib.suppress(Exception), self._client() as client:
            client.cancel(self._job, reason="measured")
        for service in self._all:
            service.signal_group(signal.SIGCONT)
        deadline = time.monotonic() + STOP_DEADLINE_S
        for service in reversed(self._all):
            service.signal_group(signal.SIGTERM)
        for service in self._all:
            service.wait(deadline)


def until(condition, what, state):
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        if time.monotonic() > deadline:
            raise Unmeasured(f"not within {WITHIN_S:g} s: {what} ({state()})")
        time.sleep(0.05)
