"""Engines in the test's process or as programs of their own, ranks as processes (worker.py), all on loopback."""

import secrets
import time
from pathlib import Path

import pytest
from rig.engines import ENGINE_MAIN, EngineJob, Program
from rig.peer_relay import Relay

from bagua.csrc import load

WORKER = Path(__file__).with_name("worker.py")


class World(EngineJob):
    """One job: an engine for each host and, after ``run`` or ``start``, a process for each rank."""

    def __init__(self, folder, hosts, **options):
        self.key = secrets.token_bytes(32)
        super().__init__(folder, hosts, **{"connect_timeout_s": 10.0, "job_key": self.key, **options})

    def start(self, script, only=None, **arguments):
        for rank in only if only is not None else self.tokens:
            self.ranks[rank] = Program(f"rank {rank}", WORKER, self.task(rank, script, args=arguments))

    def run(self, script, **arguments):
        """Runs one script on all ranks; their results."""
        self.connect()
        self.start(script, **arguments)
        return self.lines()

    def connect_by(self, relay, dialler=0, listener=1):
        """As ``connect``, but one host reaches one other by a relay."""
        addresses = [engine.address() for engine in self.engines]
        for host, engine in enumerate(self.engines):
            over = host == dialler
            engine.set_peers([relay.address if over and to == listener else at for to, at in enumerate(addresses)])


class Hosts:
    """One job whose engines are processes of their own, with one rank each, ``namespaces``: in each of these."""

    def __init__(self, folder, count, namespaces=(), **options):
        self.core, self.ranks = load().__file__, {}
        self.tokens = {member: secrets.token_hex(32) for member in range(count)}
        self.sockets = [str(folder / f"{host}.sock") for host in range(count)]
        self.prefixes = [["ip", "netns", "exec", name] for name in namespaces] or [()] * count
        self.engines = [
            Program(f"host {host}", ENGINE_MAIN, {"core": self.core}, prefix=self.prefixes[host])
            for host in range(count)
        ]
        for engine in self.engines:
            engine.answer()
        self.before = [engine.ask("resources") for engine in self.engines]
        common = {"hosts": [[host] for host in range(count)], "tokens": self.tokens, "job_key": "ab" * 32, **options}
        self.addresses = []
        for host, engine in enumerate(self.engines):
            at = {"listen": f"10.77.1.{host + 1}:0"} if namespaces else {}
            opened = engine.ask("open", job="job", index=host, socket=self.sockets[host], **common, **at)
            self.addresses.append(opened["address"])
        for engine in self.engines:
            engine.ask("peers", job="job", addresses=self.addresses)

    def start(self, script, **arguments):
        for host in range(len(self.engines)):
            task = {"core": self.core, "socket": self.sockets[host], "token": self.tokens[host], "rank": host}
            program = Program(
                f"rank {host}", WORKER, {**task, "script": script, "args": arguments}, prefix=self.prefixes[host]
            )
            self.ranks[host] = program

    def await_text(self, host, part):
        deadline = time.monotonic() + 30
        while part not in (text := self.engines[host].ask("state", job="job", longer_than_s=0.1)["waiting"]):
            assert time.monotonic() < deadline, f"'{text}' lacks '{part}'"

    def regroup(self, generation, members):
        """The generation of these members, each on its own host; the view of all of them but their rank."""
        view = {"generation": generation, "hosts": [[rank] for rank in range(len(members))], "members": members}
        for index, host in enumerate(members):
            mine = {"host_index": index, "tokens": {host: self.tokens[host]}}
            self.engines[host].say("regroup", job="job", **mine, **view)
        for host in members:
            assert "address" in self.engines[host].answer()
        for host in members:
            self.engines[host].ask("peers", job="job", addresses=[self.addresses[host] for host in members])
        return view

    def expect(self, view):
        for rank, member in enumerate(view["members"]):
            assert self.ranks[member].answer()["view"] == {**view, "rank": rank, "elastic": True, "newcomer": False}

    def stop(self):
        for process in [*self.ranks.values(), *self.engines]:
            process.end()


def stopped_at_the_end(make, end):
    made = []

    def remember(*arguments, **options):
        made.append(make(*arguments, **options))
        return made[-1]

    yield remember
    for one in made:
        end(one)


@pytest.fixture
def make_world(tmp_path_factory):
    """``make_world(hosts, **engine_options)`` -> World."""
    folder = tmp_path_factory.mktemp("e", numbered=True)
    yield from stopped_at_the_end(lambda hosts, **options: World(folder, hosts, **options), World.stop)


@pytest.fixture
def make_hosts(tmp_path_factory):
    """``make_hosts(count, **engine_options)`` -> Hosts."""
    make = lambda count, **options: Hosts(tmp_path_factory.mktemp("h", numbered=True), count, **options)  # noqa: E731
    yield from stopped_at_the_end(make, Hosts.stop)


@pytest.fixture
def members(make_world):
    """``members(ranks, **engine_options)`` -> (world, ranks of its one host, in this process)."""
    joined = []

    def make(ranks, **options):
        world = make_world([list(range(ranks))], **options)
        made = [load().Rank(data_socket=world.sockets[0], token=world.tokens[rank], rank=rank) for rank in range(ranks)]
        joined.extend(made)
        return world, made

    yield make
    for rank in joined:
        rank.close()


@pytest.fixture
def make_relay():
    """``make_relay(target, kind=Relay)``."""
    yield from stopped_at_the_end(lambda target, kind=Relay, **options: kind(target, **options), Relay.close)


@pytest.fixture
def wait_for():
    """``wait_for(condition, seconds)``: returns when the condition holds, fails otherwise."""

    def wait(condition, seconds=10.0):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    return wait
