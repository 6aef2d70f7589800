"""Ranks that stay: they have joined a job, and run one function after another for as long as the tests last.

A function that ends badly on one rank costs these ranks, and the next function gets others. So functions that end
their process, change it for good, or leave a collective half done, may be run, but pay for it: 0.2 s of a core.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from bagua.base.system_limits import await_readable
from rig.ranks.engine_hosts import RankProcess, Ranks
from rig.ranks.pool_rank import rank_serve

HANG_S = 120.0
"""After which a function hangs. They take milliseconds, and minutes beside much else with torch.compile."""
LEAVE_S = 5.0
"""For ranks to end when their pool does."""
LAST = 3
"""Functions that are named when one after them goes wrong."""
Answer = tuple[Any, str]
"""A function's result, or the error that kept it from one."""


@dataclass
class Seat:
    """A rank, the channel to it, and how much of its output has been seen."""

    rank: RankProcess
    channel: socket.socket
    stream: BinaryIO
    seen: int = 0

    def news(self):
        """The rank's output since the last call."""
        whole = self.rank.log.read_bytes()
        new, self.seen = whole[self.seen :], len(whole)
        return new.decode(errors="replace")

    def answer(self):
        """The rank's answer, when its channel is readable."""
        try:
            found = pickle.load(self.stream)
        except (EOFError, ConnectionError):
            self.rank.process.wait()
            found = (None, f"ended with exit code {self.rank.process.returncode}")
        return found


def last_words(error):
    """The first line of the exception at a traceback's end."""
    lines = error.strip().splitlines()
    last = max((place for place, line in enumerate(lines) if line.startswith("  ")), default=-1)
    return lines[min(last + 1, len(lines) - 1)]


class Pool:
    """Ranks of one layout, started with the first function.

    ``hosts``: ranks of every host. ``elastic``: ranks of an elastic job. ``environment``: variables of the ranks.
    """

    def __init__(self, hosts, elastic=False, environment=None):
        self._hosts = [list(ranks) for ranks in hosts]
        self._elastic = elastic
        self._environment = environment
        self._seats = []
        self._ranks = None
        self._folder = None
        self._done = []
        self.starts = 0
        """How often ranks were started."""

    def run(self, function, hang_s=HANG_S, **arguments):
        """Runs ``function(**arguments)``, of a file that has no relative imports, on every rank. Returns their results.
        Fails the test with the errors of all ranks if it did not return on one of them."""
        if not self._seats:
            self._start()
        name = f"{function.__name__}({', '.join(map(str, arguments.values()))})"
        task = pickle.dumps((function.__code__.co_filename, function.__name__, arguments))
        for seat in self._seats:
            seat.news()
            with contextlib.suppress(ConnectionError):  # it has ended since: ``_answers`` tells
                seat.channel.sendall(task)
        answers = self._answers(hang_s)
        pairs = enumerate(zip(self._seats, answers, strict=True))
        failed = {rank: (error, seat.news()) for rank, (seat, (_, error)) in pairs if error}
        if failed:
            short = "; ".join(f"rank {rank}: {last_words(error)}" for rank, (error, _) in failed.items())
            waits = [host.engine.waiting(0.0) for host in self._ranks.hosts] if self._ranks else []
            whole = [f"rank {rank}: {error}\n{output}" for rank, (error, output) in failed.items()]
            before = f"before it: {', '.join(self._done[-LAST:]) or 'nothing'}"
            self.close()
            pytest.fail("\n".join([f"{name}: {short}", before, *whole, *waits]), pytrace=False)
        self._done.append(name)
        return [result for result, _ in answers]

    def _start(self):
        self.starts += 1
        self._done = []
        self._folder = tempfile.TemporaryDirectory(prefix="bg-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        self._ranks = Ranks(folder)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "pool.sock"))
            listener.listen()
            started = self._ranks.start(
                rank_serve,
                hosts=self._hosts,
                elastic=self._elastic,
                environment=self._environment,
                address=str(folder / "pool.sock"),
            )
            by_rank = {}
            while len(by_rank) < len(started):
                if await_readable([listener], 1.0):
                    channel, _ = listener.accept()
                    stream = channel.makefile("rb")
                    by_rank[pickle.load(stream)] = (channel, stream)
                elif any(one.process.poll() is not None for one in started):
                    pytest.fail("\n".join(f"rank {one.rank}: {one.output}" for one in started), pytrace=False)
        self._seats = [Seat(one, *by_rank[one.rank]) for one in started]

    def _answers(self, hang_s):
        """Of all ranks. A rank that failed ends, so that the others hear of it."""
        found = {}
        deadline = time.monotonic() + hang_s
        while len(found) < len(self._seats):
            waiting = {seat.channel: rank for rank, seat in enumerate(self._seats) if rank not in found}
            ready = await_readable(waiting, deadline - time.monotonic())
            for channel in ready:
                found[waiting[channel]] = self._seats[waiting[channel]].answer()
            if not ready:
                assert self._ranks is not None
                self._ranks.ask_where_they_are()
                found |= {rank: (None, f"did not return in {hang_s} s") for rank in waiting.values()}
        return [answer for _, answer in sorted(found.items())]

    def close(self):
        """Ends the ranks; the next function gets others."""
        for seat in self._seats:
            seat.stream.close()
            seat.channel.close()
        for seat in self._seats:
            try:
                seat.rank.process.wait(0.0 if seat.rank.process.poll() is not None else LEAVE_S)
            except subprocess.TimeoutExpired:
                continue  # it is killed
        self._seats = []
        if self._ranks is not None:
            self._ranks.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._ranks = self._folder = None


class Pools:
    """The pools of one process of pytest, each made when it is first wanted."""

    def __init__(self):
        self._made = {}

    def __call__(self, *hosts, elastic=False, environment=None):
        """Ranks of every host, as ``pools([0, 1])`` and ``pools([0], [1])``."""
        key = f"{[list(one) for one in hosts]} {elastic} {environment}"
        if key not in self._made:
            self._made[key] = Pool(hosts, elastic, environment)
        return self._made[key]

    def close(self):
        for pool in self._made.values():
            pool.close()
