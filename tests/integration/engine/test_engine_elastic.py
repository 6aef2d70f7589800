"""Elastic jobs: processes are killed or stopped, the others go on in the next generation."""

import signal
import time

import pytest

COUNT = 1 << 20  # float32: the whole segment of a worker


@pytest.mark.parametrize("encryption", ["always", "never"])
def test_a_changed_bit_between_hosts_costs_no_member(make_world, make_relay, encryption):
    """The results that the next generation has are right ones: a rank checks each of them."""
    world = make_world([[0], [1]], elastic=True, encryption=encryption)
    relay = make_relay(world.engines[1].address())
    for generation in (1, 2):
        world.connect_by(relay)
        if generation == 1:
            world.start("through", count=COUNT)
        for member in (0, 1):
            assert world.line(member)["view"]["generation"] == generation
        if generation == 2:
            break
        relay.corrupt()
        assert all(world.line(member)["regrouped"] for member in (0, 1))
        kinds = {event["kind"] for engine in world.engines for event in engine.events()}
        assert "suspended" in kinds and "error" not in kinds
        assert sum(engine.stats()["frames_refused"] for engine in world.engines) >= 1
        for index, engine in enumerate(world.engines):
            engine.regroup(generation=2, host_index=index, hosts=[[0], [1]], members=[0, 1], tokens={})


@pytest.fixture
def two_hosts(make_hosts):
    """``two_hosts(rest_s)``: their ranks are in the first generation. The timeout of jobs that can't go on is long."""

    def make(rest_s=0.0):
        job = make_hosts(2, elastic=True, peer_timeout_s=3600.0)
        job.start("through", count=COUNT, rest_s=rest_s)
        job.expect({"generation": 1, "hosts": [[0], [1]], "members": [0, 1]})
        assert job.engines[0].ask("know_step", job="job")["step_s"] >= rest_s
        return job

    return make


def expect_silence(job):
    event = job.engines[0].ask("await", job="job", kind="suspended")
    assert event["host"] == 1 and "its daemon does not run" in event["text"], event


def test_a_host_is_stopped(two_hosts):
    job = two_hosts()
    job.engines[1].signal(signal.SIGSTOP)
    expect_silence(job)
    assert "its daemon does not run" in job.ranks[0].answer()["regrouped"]
    job.expect(job.regroup(2, [0]))


def test_a_host_is_stopped_at_the_beginning_of_a_generation(two_hosts):
    """After its connections, and before it said anything. Others know from before how long it may be silent."""
    job = two_hosts()
    for rank in job.ranks.values():
        rank.signal(signal.SIGSTOP)
    job.regroup(2, [0, 1])
    time.sleep(1)  # they connect
    job.engines[1].signal(signal.SIGSTOP)
    job.ranks[0].signal(signal.SIGCONT)
    expect_silence(job)


def test_a_host_has_eight_steps_also_at_the_beginning_of_a_generation(two_hosts):
    """It stands still for longer than the five seconds that it has where steps are short."""
    job = two_hosts(rest_s=1.2)
    for generation in (2, 3):
        view = job.regroup(generation, [0, 1])
        for member in (0, 1):
            told = job.ranks[member].answer()["regrouped"]
            assert f"generation {generation} follows" in told  # nobody was lost before
        job.expect(view)
        if generation == 2:
            job.engines[1].signal(signal.SIGSTOP)
            time.sleep(6)
            job.engines[1].signal(signal.SIGCONT)


@pytest.mark.parametrize("fences", [True, False], ids=["fenced", "not fenced"])
def test_a_fenced_operation_ends_after_all_before_it(make_world, make_relay, fences):
    """On all hosts: rank 0 sees its end when rank 1 has what it sent before. Without the fence rank 1's part is there
    at once."""
    world = make_world([[0], [1]])
    relay = make_relay(world.engines[1].address())
    relay.rate = 8e6
    world.connect_by(relay)
    world.start("fenced", count=COUNT, fences=fences)
    times = world.lines()
    assert (times[0]["small"] >= times[1]["large"]) == fences, times


@pytest.mark.parametrize("hosts", [[[0, 1, 2]], [[0], [1, 2]]], ids=str)
def test_flags_go_behind_an_operation_and_are_waited_for_with_it(make_world, hosts):
    """They tell the most and the least that a rank was given. Where one of the operations is not over well, each is
    waited for by itself, and the flags are not over well either. Both are submitted, or none."""
    world = make_world(hosts, elastic=True)
    world.connect()
    world.start("flags", count=1000, given=5)
    told = world.lines()
    assert told == {rank: {"told": [7, -5, 0]} for rank in range(3)}, told
    world.kill(2)
    for member in (0, 1):
        found = world.line(member)
        assert found.get("flags_well") is False and found["rounds"] > 0, found
