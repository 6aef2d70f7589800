"""Starts hosts and ranks, talks to them, and ends them. Every wait has a deadline."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rig.engines import DEADLINE_S, ENGINE_MAIN, Failure, Program

from bagua.csrc import load

RANK = Path(__file__).with_name("rank.py")


@dataclass(frozen=True)
class Held:
    """Resources of a process: bytes of memory that are resident (shared pages too, each once), descriptors, threads,
    mappings."""

    resident: int
    descriptors: int
    threads: int
    mappings: int


def held_by(pid):
    proc = Path(f"/proc/{pid}")
    rollup = dict(line.split(":", 1) for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
    return Held(
        int(rollup["Rss"].split()[0]) * 1024,
        len(os.listdir(proc / "fd")),
        len(os.listdir(proc / "task")),
        len((proc / "maps").read_text().splitlines()),
    )


def shared_memory_of(pid):
    """Inodes of the anonymous files that the process has open or mapped."""
    mapped = (line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    found = {int(parts[4]) for parts in mapped if len(parts) == 6 and parts[5].startswith("/memfd:")}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        if os.readlink(entry).startswith("/memfd:"):
            found.add(entry.stat().st_ino)
    return found


class Hosts:
    """Processes that stand for node daemons; several jobs may use the same."""

    def __init__(self, number):
        self.core = str(load().__file__)
        self.processes = [Program(f"host {index}", ENGINE_MAIN, {"core": self.core}) for index in range(number)]
        for process in self.processes:
            process.answer()

    def end(self):
        for process in self.processes:
            process.end()


class Job:
    """One job: an engine on each host, a process for each rank."""

    def __init__(self, hosts, layout, name="job", **options):
        self.hosts, self.layout, self.name = hosts, [list(ranks) for ranks in layout], name
        self.folder = tempfile.TemporaryDirectory(prefix="bgp-", dir="/tmp")  # short: paths of Unix sockets are limited
        self.tokens = {rank: secrets.token_hex(32) for ranks in self.layout for rank in ranks}
        self.sockets = [f"{self.folder.name}/{index}.sock" for index in range(len(self.layout))]
        self.ranks = {}
        # Another order of the ring rounds differently: two runs have the same bits only where it is not measured.
        settings = {"measure_ring": False, "job_key": secrets.token_hex(32), **options}
        for index, host in enumerate(hosts.processes[: len(self.layout)]):
            mine = {"index": index, "hosts": self.layout, "socket": self.sockets[index], "tokens": self.tokens}
            host.say("open", job=name, **settings, **mine)
        addresses = [host.answer()["address"] for host in hosts.processes[: len(self.layout)]]
        for host in hosts.processes[: len(self.layout)]:
            host.ask("peers", job=name, addresses=addresses)

    @property
    def size(self):
        return len(self.tokens)

    def task(self, rank):
        index = next(index for index, ranks in enumerate(self.layout) if rank in ranks)
        return {
            "core": self.hosts.core,
            "socket": self.sockets[index],
            "token": self.tokens[rank],
            "rank": rank,
            "world": self.size,
            "hosts": self.layout,
        }

    def start(self):
        """Starts all ranks and waits until they have joined."""
        for rank in self.tokens:
            self.ranks[rank] = Program(f"rank {rank} of {self.name}", RANK, self.task(rank))
        for rank, answer in self.answers().items():
            if answer != {"ready": True}:
                raise Failure(f"rank {rank} did not join: {answer}")
        return self

    def answers(self, ranks=None, timeout=DEADLINE_S):
        return {rank: self.ranks[rank].answer(timeout) for rank in (self.ranks if ranks is None else ranks)}

    def say(self, do, **more):
        for process in self.ranks.values():
            process.say(do, **more)

    def ask(self, do, timeout=DEADLINE_S, **more):
        self.say(do, **more)
        return self.answers(timeout=timeout)

    def state(self, host=0):
        return self.hosts.processes[host].ask("state", job=self.name, longer_than_s=0.0)

    def verify(self, cases, check=True, timeout=DEADLINE_S):
        """Runs the cases on all ranks. Returns the digests of the results by case and rank, and the largest share of a
        bound that an error used. Raises Failure with what is wrong."""
        found = self.ask("cases", timeout=timeout, cases=cases, check=check)
        errors = {rank: answer["error"] for rank, answer in found.items() if "error" in answer}
        if errors:
            raise Failure(str(errors))
        wrong = [text for answer in found.values() for text in answer["wrong"]]
        if wrong:
            raise Failure("\n".join(wrong))
        digests = [list(of_case) for of_case in zip(*(answer["digests"] for answer in found.values()), strict=True)]
        for case, of_case in zip(cases, digests, strict=True):
            if case["kind"] in ("allreduce", "broadcast", "allgather") and len(set(of_case)) != 1:
                raise Failure(f"{case}: the ranks have different bits")
        return digests, max(answer["share"] for answer in found.values())

    def leave(self):
        """All ranks end in good order, then the engines."""
        for process in self.ranks.values():
            process.say("end")
        for process in self.ranks.values():
            process.process.wait(DEADLINE_S)
        self.close()

    def close(self):
        for host in self.hosts.processes[: len(self.layout)]:
            if host.process.poll() is None:
                host.ask("close", job=self.name)

    def end(self):
        for process in self.ranks.values():
            process.end()
        self.folder.cleanup()


def wait_for(condition, seconds, explain=lambda: ""):
    """The first true value of ``condition``, looked at every 20 ms. Raises Failure after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise Failure(f"it did not happen in {seconds} s. {explain()}")
        time.sleep(0.02)
    return found
