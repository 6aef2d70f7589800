"""The rig of all tests that start engines: an engine with the settings of tests, programs that answer lines, and a job
whose engines live in the test's process. ``engine_main.py`` is the program that holds engines for other tests."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from bagua.base.system_limits import await_readable
from bagua.csrc import load

DEADLINE_S = 120.0
ENGINE_MAIN = Path(__file__).with_name("engine_main.py")


def open_engine(core, hosts, index, socket, tokens, **options):
    """The engine of host ``index`` on loopback; ``tokens`` may hold those of other hosts' ranks too."""
    settings = {"job_id": "test", "generation": 1, "job_key": b"k" * 32, "listen": "127.0.0.1:0", **options}
    mine = {rank: tokens[rank] for rank in hosts[index]}
    return core.Engine(
        host_index=index, hosts=[list(ranks) for ranks in hosts], data_socket=socket, tokens=mine, **settings
    )


def open_lobby(core, members, socket, tokens, **options):
    """The engine of a host that has these newcomers alone, on loopback."""
    settings = {"job_id": "test", "generation": 1, "job_key": b"k" * 32, "listen": "127.0.0.1:0", **options}
    ranks = [list(range(len(members)))]
    return core.Engine(
        host_index=0,
        hosts=ranks,
        members=list(members),
        data_socket=socket,
        tokens=tokens,
        elastic=True,
        newcomers=True,
        **settings,
    )


class Failure(AssertionError):
    """A process said nothing in time, or ended; or a condition did not come true."""


class Program:
    """A Python program of the tests that gets one JSON document as its argument and answers lines with JSON lines."""

    def __init__(self, name, path, argument, environment=None, prefix=()):
        self.name = name
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(environment or {})}
        command = [*prefix, sys.executable, str(path), json.dumps(argument)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=variables
        )
        self._rest = b""

    @property
    def pid(self):
        return self.process.pid

    def write(self, line=""):
        """A line as it is; an empty one ends a ``pause`` of a script."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def say(self, do, **more):
        self.write(json.dumps({"do": do, **more}))

    def answer(self, timeout=DEADLINE_S):
        """The next line that it prints. Raises Failure."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            if not await_readable([self.process.stdout], left):
                raise Failure(f"{self.name} said nothing for {timeout} s")
            read = os.read(self.process.stdout.fileno(), 1 << 20)
            if not read:
                raise Failure(f"{self.name} ended without an answer, with {self.process.wait()}")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        found = json.loads(line)
        return found

    def ask(self, do, timeout=DEADLINE_S, **more):
        self.say(do, **more)
        return self.answer(timeout)

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        self.process.kill()  # ends a stopped one too
        self.process.communicate()


class EngineJob:
    """One job: an engine for each host in this process and, once started, a program for each rank."""

    def __init__(self, folder, hosts, **options):
        """``job_key`` and ``encryption`` may be a list with one value for each host."""
        self.hosts = [list(ranks) for ranks in hosts]
        self.tokens = {rank: secrets.token_bytes(32) for ranks in hosts for rank in ranks}
        self.sockets = [str(folder / f"{secrets.token_hex(4)}.sock") for _ in hosts]
        self.engines = []
        for index, socket in enumerate(self.sockets):
            mine = {name: value[index] if isinstance(value, list) else value for name, value in options.items()}
            self.engines.append(open_engine(load(), self.hosts, index, socket, self.tokens, **mine))
        self.ranks = {}

    def connect(self):
        """Tells every engine where the others are."""
        for engine in self.engines:
            engine.set_peers([peer.address() for peer in self.engines])

    def host_of(self, rank):
        return next(index for index, ranks in enumerate(self.hosts) if rank in ranks)

    def task(self, rank, script, **more):
        """The argument of a rank's program."""
        return {
            "core": load().__file__,
            "socket": self.sockets[self.host_of(rank)],
            "token": self.tokens[rank].hex(),
            "rank": rank,
            "script": script,
            **more,
        }

    def line(self, rank, timeout=DEADLINE_S):
        """The next line that ``rank`` prints. Raises Failure with who waits for whom."""
        try:
            return self.ranks[rank].answer(timeout)
        except Failure as failure:
            raise Failure("\n".join([str(failure), *(engine.waiting(0.0) for engine in self.engines)])) from None

    def lines(self, ranks=None, timeout=DEADLINE_S):
        return {rank: self.line(rank, timeout) for rank in (self.ranks if ranks is None else ranks)}

    def go_on(self, rank):
        """Ends a ``pause`` of a script."""
        self.ranks[rank].write()

    def kill(self, rank):
        self.ranks[rank].process.kill()
        self.ranks[rank].process.wait()

    def stop(self):
        for engine in self.engines:
            engine.close()
        for rank in self.ranks.values():
            rank.end()
