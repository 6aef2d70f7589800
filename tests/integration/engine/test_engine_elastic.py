"""Elastic jobs: processes are killed, the others go on in the next generation."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_relay import Relay
from rig.engines import ENGINE_MAIN, Program

from bagua.csrc import load

WORKER = Path(__file__).with_name("worker.py")
COUNT = 1 << 20  # float32: the whole segment of a worker
LATE = "all-reduce #1 of world (bucket 1): ranks 0, 2, 3 have been waiting for rank 1 for "


def regroup(world: Any, generation: int, members: list[int]) -> None:
    """As a node daemon does when the coordinator has formed a generation of these members, all on one host."""
    world.engines[0].regroup(
        generation=generation, host_index=0, hosts=[list(range(len(members)))], members=members, tokens={}
    )


def expect_views(world: Any, generation: int, members: list[int]) -> None:
    """All of them have entered, and had a right result."""
    for rank, member in enumerate(members):
        view = world.line(member)["view"]
        assert view == {
            "generation": generation,
            "rank": rank,
            "hosts": [list(range(len(members)))],
            "members": members,
            "elastic": True,
            "newcomer": False,
        }


@pytest.mark.parametrize("idle", [False, True], ids=["at work", "others wait for it"])
def test_losses_until_one_is_left(make_world: Callable[..., Any], wait_for: Callable[..., None], idle: bool) -> None:
    world = make_world([[0, 1, 2, 3]], elastic=True)
    world.start("through", count=COUNT, idle=idle)
    members = [0, 1, 2, 3]
    expect_views(world, 1, members)
    for generation, gone in enumerate([1, 3, 0], start=2):
        rank = members.index(gone)
        if idle and gone == 1:
            wait_for(lambda: LATE in world.engines[0].waiting(0.0))
        world.kill(gone)
        members.remove(gone)
        for member in members:
            name = f"rank {rank}" if rank == gone else f"rank {rank} (member {gone})"
            assert world.line(member)["regrouped"].startswith(f"{name} (pid {world.ranks[gone].pid}) went away")
        events = [event for event in world.engines[0].events() if event["kind"] in ("suspended", "error")]
        assert [(event["kind"], event["rank"], event.get("host")) for event in events] == [("suspended", gone, -1)]
        assert world.engines[0].error() == ""
        regroup(world, generation, members)
        expect_views(world, generation, members)


def test_the_same_members_go_on(make_world: Callable[..., Any]) -> None:
    world = make_world([[0, 1, 2]], elastic=True)
    world.start("through", count=COUNT)
    expect_views(world, 1, [0, 1, 2])
    for generation in (2, 5, 6):
        regroup(world, generation, [0, 1, 2])
        for member in range(3):
            assert f"generation {generation} follows" in world.line(member)["regrouped"]
        expect_views(world, generation, [0, 1, 2])


class Flipper(Relay):
    """Changes one bit of the first large piece once it was told to."""

    def __init__(self, target: str) -> None:
        self.armed = threading.Event()
        super().__init__(target)

    def change(self, data: bytes) -> bytes:
        if len(data) < 1000 or not self.armed.is_set():
            return data
        self.armed.clear()
        return data[:500] + bytes([data[500] ^ 1]) + data[501:]


@pytest.mark.parametrize("encryption", ["always", "never"])
def test_a_changed_bit_between_hosts_costs_no_member(make_world: Callable[..., Any], encryption: str) -> None:
    """The results that the next generation has are right ones: a rank checks each of them."""
    world = make_world([[0], [1]], elastic=True, encryption=encryption)
    relay = Flipper(world.engines[1].address())
    try:
        for generation in (1, 2):
            world.engines[0].set_peers([world.engines[0].address(), relay.address])
            world.engines[1].set_peers([engine.address() for engine in world.engines])
            if generation == 1:
                world.start("through", count=COUNT)
            for member in (0, 1):
                assert world.line(member)["view"]["generation"] == generation
            if generation == 2:
                break
            relay.armed.set()
            assert all(world.line(member)["regrouped"] for member in (0, 1))
            kinds = {event["kind"] for engine in world.engines for event in engine.events()}
            assert "suspended" in kinds and "error" not in kinds
            assert sum(engine.stats()["frames_refused"] for engine in world.engines) >= 1
            for index, engine in enumerate(world.engines):
                engine.regroup(generation=2, host_index=index, hosts=[[0], [1]], members=[0, 1], tokens={})
    finally:
        relay.close()


class Hosts:
    """One job whose engines are processes of their own, with one rank each."""

    def __init__(self, folder: Path, count: int, rest_s: float = 0.0, **options: Any) -> None:
        self.rest_s = rest_s
        core = load().__file__
        self.tokens = {member: secrets.token_hex(32) for member in range(count + 1)}
        self.sockets = [str(folder / f"{host}.sock") for host in range(count)]
        self.engines = [Program(f"host {host}", ENGINE_MAIN, {"core": core}) for host in range(count)]
        for engine in self.engines:
            engine.answer()
        hosts = [[host] for host in range(count)]
        common = {"hosts": hosts, "tokens": self.tokens, "job_key": secrets.token_hex(32), "elastic": True, **options}
        self.addresses = [
            engine.ask("open", job="job", index=host, socket=self.sockets[host], **common)["address"]
            for host, engine in enumerate(self.engines)
        ]
        for engine in self.engines:
            engine.ask("peers", job="job", addresses=self.addresses)
        self.ranks: dict[int, Program] = {}
        for host in range(count):
            self.start(host, host)

    def start(self, host: int, member: int) -> None:
        task = {
            "core": load().__file__, "socket": self.sockets[host], "token": self.tokens[member], "rank": member,
            "world": 0, "script": "through", "args": {"count": COUNT, "rest_s": self.rest_s},
        }  # fmt: skip
        self.ranks[member] = Program(f"member {member}", WORKER, task)

    def regroup(self, generation: int, members: dict[int, list[int]]) -> dict[str, Any]:
        """The generation of these members, by the engines that are in it; the view of all of them but their rank."""
        everybody = [member for there in members.values() for member in there]
        hosts = [[everybody.index(member) for member in there] for there in members.values()]
        view = {"generation": generation, "hosts": hosts, "members": everybody}
        for index, (host, there) in enumerate(members.items()):
            tokens = {member: self.tokens[member] for member in there}
            self.engines[host].say("regroup", job="job", host_index=index, tokens=tokens, **view)
        for host in members:
            assert "address" in self.engines[host].answer()
        for host in members:
            self.engines[host].ask("peers", job="job", addresses=[self.addresses[host] for host in members])
        return view

    def expect(self, view: dict[str, Any]) -> None:
        for rank, member in enumerate(view["members"]):
            assert self.ranks[member].answer()["view"] == {**view, "rank": rank, "elastic": True, "newcomer": False}

    def stop(self) -> None:
        for process in [*self.ranks.values(), *self.engines]:
            process.end()


@pytest.fixture
def make_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(count: int, **options: Any) -> Hosts:
        made.append(Hosts(tmp_path_factory.mktemp("h", numbered=True), count, **options))
        return made[-1]

    yield make
    for hosts in made:
        hosts.stop()


def test_hosts_are_killed(make_hosts: Callable[..., Hosts]) -> None:
    """Daemon and rank of a host at once; at last one host is left, which then gets a new member."""
    job = make_hosts(3)
    job.expect({"generation": 1, "hosts": [[0], [1], [2]], "members": [0, 1, 2]})
    for generation, gone, left in ((2, 1, {0: [0], 2: [2]}), (3, 0, {2: [2]})):
        job.engines[gone].end()
        job.ranks[gone].end()
        for host, members in left.items():
            event = job.engines[host].ask("await", job="job", kind="suspended")
            assert event["rank"] == -1 and event["host"] == (1 if generation == 2 else 0), event
            assert "regrouped" in job.ranks[members[0]].answer()
        job.expect(job.regroup(generation, left))
    view = job.regroup(4, {2: [2, 3]})
    assert "generation 4 follows" in job.ranks[2].answer()["regrouped"]
    job.start(2, 3)
    job.expect(view)


def test_a_host_is_stopped(make_hosts: Callable[..., Hosts]) -> None:
    """It is out long before the timeout of jobs that can't go on without it."""
    job = make_hosts(2, peer_timeout_s=3600.0)
    job.expect({"generation": 1, "hosts": [[0], [1]], "members": [0, 1]})
    job.engines[0].ask("know_step", job="job")
    job.engines[1].signal(signal.SIGSTOP)
    event = job.engines[0].ask("await", job="job", kind="suspended")
    assert event["host"] == 1 and "its daemon does not run" in event["text"], event
    assert "its daemon does not run" in job.ranks[0].answer()["regrouped"]
    job.expect(job.regroup(2, {0: [0]}))


def test_a_host_is_stopped_at_the_beginning_of_a_generation(make_hosts: Callable[..., Hosts]) -> None:
    """After its connections, and before it said anything. Others know from before how long it may be silent."""
    job = make_hosts(2, peer_timeout_s=3600.0)
    job.expect({"generation": 1, "hosts": [[0], [1]], "members": [0, 1]})
    job.engines[0].ask("know_step", job="job")
    for rank in job.ranks.values():
        rank.signal(signal.SIGSTOP)
    job.regroup(2, {0: [0], 1: [1]})
    time.sleep(1)  # they connect
    job.engines[1].signal(signal.SIGSTOP)
    job.ranks[0].signal(signal.SIGCONT)
    event = job.engines[0].ask("await", job="job", kind="suspended")
    assert event["host"] == 1 and "its daemon does not run" in event["text"], event


def test_a_host_has_eight_steps_also_at_the_beginning_of_a_generation(make_hosts: Callable[..., Hosts]) -> None:
    """It stands still for longer than the five seconds that it has where steps are short."""
    job = make_hosts(2, rest_s=1.2)
    job.expect({"generation": 1, "hosts": [[0], [1]], "members": [0, 1]})
    assert job.engines[0].ask("know_step", job="job")["step_s"] >= 1.2
    view = job.regroup(2, {0: [0], 1: [1]})
    for member in (0, 1):
        assert "generation 2 follows" in job.ranks[member].answer()["regrouped"]
    job.expect(view)
    job.engines[1].signal(signal.SIGSTOP)
    time.sleep(6)
    job.engines[1].signal(signal.SIGCONT)
    view = job.regroup(3, {0: [0], 1: [1]})
    for member in (0, 1):
        assert "generation 3 follows" in job.ranks[member].answer()["regrouped"]  # nobody was lost before
    job.expect(view)


def test_a_rank_is_killed_on_one_of_two_hosts(make_hosts: Callable[..., Hosts]) -> None:
    """The other host is told whose loss it is, and the host without a rank can go on with a new one."""
    job = make_hosts(2)
    job.expect({"generation": 1, "hosts": [[0], [1]], "members": [0, 1]})
    job.ranks[1].end()
    for engine in job.engines:
        event = engine.ask("await", job="job", kind="suspended")
        assert event["rank"] == 1 and event["text"].startswith(f"rank 1 (pid {job.ranks[1].pid}) went away"), event
    assert "regrouped" in job.ranks[0].answer()
    view = job.regroup(7, {0: [0], 1: [2]})
    job.start(1, 2)
    job.expect(view)


@pytest.mark.parametrize("fences", [True, False], ids=["fenced", "not fenced"])
def test_a_fenced_operation_ends_after_all_before_it(make_world: Callable[..., Any], fences: bool) -> None:
    """On all hosts: rank 0 sees its end when rank 1 has what it sent before. Without the fence rank 1's part is there
    at once."""
    world = make_world([[0], [1]])
    relay = Relay(world.engines[1].address())
    relay.rate = 8e6
    try:
        world.engines[0].set_peers([world.engines[0].address(), relay.address])
        world.engines[1].set_peers([engine.address() for engine in world.engines])
        world.start("fenced", count=COUNT, fences=fences)
        times = world.lines()
    finally:
        relay.close()
    assert (times[0]["small"] >= times[1]["large"]) == fences, times


@pytest.mark.parametrize("hosts", [[[0, 1, 2]], [[0], [1, 2]]], ids=str)
def test_flags_go_behind_an_operation_and_are_waited_for_with_it(make_world: Callable[..., Any], hosts: Any) -> None:
    """They tell the most and the least that a rank was given. Where one of the operations is not over well, each is
    waited for by itself, and the flags are not over well either. Both are submitted, or none."""
    world = make_world(hosts, elastic=True)
    for engine in world.engines:
        engine.set_peers([other.address() for other in world.engines])
    world.start("flags", count=1000, given=5)
    told = world.lines()
    assert told == {rank: {"told": [7, -5, 0]} for rank in range(3)}, told
    world.kill(2)
    for member in (0, 1):
        found = world.line(member)
        assert found.get("flags_well") is False and found["rounds"] > 0, found
