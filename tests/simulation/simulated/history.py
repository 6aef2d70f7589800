"""Histories: drawn from a seed, or one fixed course of events with trouble at one chosen question to the database."""

import asyncio
import random

from bagua.daemon.coordinator.rounds import requests
from simulated.coordinator import Life
from simulated.daemon import EXITED
from simulated.database import Trouble
from simulated.loop import VirtualLoop
from simulated.store import MemoryStore
from simulated.world import BrokenPromiseError, Elastic, World


def play(story):
    """Runs a history to its end; returns how often the database was asked. Raises BrokenPromiseError."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(story)
    finally:
        loop.run_until_complete(_sweep(loop))
        loop.close()


async def _sweep(loop):
    """Ends whatever still runs, and what that begins."""
    loop.set_exception_handler(lambda loop, context: None)
    this = asyncio.current_task()
    while left := [task for task in loop.unfinished if task is not this]:
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def drawn(seed, make_life=Life, make_store=MemoryStore):
    """Plays the events of the seed, then heals all faults, then cancels every job. With every fourth seed jobs are
    elastic."""
    rng = random.Random(seed)
    trouble = Trouble(rng, rate=rng.choice((0.0, 0.05, 0.2, 0.5)))
    elastic = seed % 4 == 0
    nodes = rng.choice((1, 2, 2, 3) if elastic else (1, 1, 1, 2, 2, 3))
    world = World(rng, trouble, make_store, nodes, rng.choice((1, 2)), make_life)
    await world.start_coordinator()
    dead = set()
    if elastic:
        size = rng.randint(1, nodes)
        world.submit(size, rng.randint(1, world.daemons[0].slots), Elastic.drawn(rng, size, nodes))
        await asyncio.sleep(rng.choice((0.0, 3.0)))
    else:
        world.submit(*_shape(rng))
    for _ in range(rng.choice((1, 2, 3, 5, 7) if elastic else (1, 1, 2, 2, 3, 5))):
        await asyncio.sleep(rng.choice((0.0, 0.01, 0.5, 3.0, 12.0)) * rng.random())
        usual = ACTIONS if not elastic else rng.choice((ACTIONS, LOSSES, LOSSES, WISHES, WISHES))
        rng.choice(usual)(world, rng, dead)
    await asyncio.sleep(rng.choice((0.0, 0.0, 3.0, 12.0, 25.0)))
    await _end_well(world, dead)
    return trouble.asked


async def fixed(plan, seed=0):
    """Two daemons, a job on both and one that waits, a daemon that is lost, one that is restarted, a coordinator that
    is replaced; trouble at the questions of ``plan``."""
    rng = random.Random(seed)
    trouble = Trouble(rng, 0.0, plan)
    world = World(rng, trouble, MemoryStore, nodes=2, slots=1)
    await world.start_coordinator()
    world.submit(2, 1)
    world.submit(1, 1)
    await asyncio.sleep(4.0)
    world.daemons[0].tear()
    await asyncio.sleep(4.0)
    world.daemons[1].link.silent_until = world.daemons[1].link.loop.time() + 30.0
    await asyncio.sleep(34.0)
    world.daemons[0].kill()
    world.daemons[0].restart()
    world.submit(1, 1)
    await asyncio.sleep(3.0)
    world.replace(gently=True, seconds=1.0)
    await asyncio.sleep(5.0)
    world.replace(gently=False, seconds=1.0)
    await asyncio.sleep(5.0)
    await _end_well(world, set())
    return trouble.asked


async def late_hello():
    """A stream is held up on its way while a younger one passes, and a job begins by that one."""
    trouble = Trouble(random.Random(0), 0.0)
    world = World(random.Random(0), trouble, MemoryStore, nodes=1, slots=1)
    daemon = world.daemons[0]
    await world.start_coordinator()
    while daemon.stream is None:
        await asyncio.sleep(0.001)
    held = daemon.stream
    held.lost_until = held.link.loop.time() + 8.0  # a coordinator waits ten for the Hello
    held.tear()
    world.submit(1, 1)
    await asyncio.sleep(30.0)
    await _end_well(world, set())
    return trouble.asked


async def outage(away, seconds):
    """An elastic job on two nodes; the database or the coordinator is ``away`` for so long. In the middle of that time
    a rank is killed. Raises BrokenPromiseError unless training goes on until then, and the change waits."""
    trouble = Trouble(random.Random(0), 0.0)
    world = World(random.Random(0), trouble, MemoryStore, nodes=2, slots=2)
    await world.start_coordinator()
    world.submit(2, 2, Elastic(least=0, most=2, respawn=0, takes=True))
    await asyncio.sleep(20.0)
    if away == "database":
        trouble.down_until = world.daemons[0].link.loop.time() + seconds
    else:
        world.replace(gently=False, seconds=seconds)
    for part in range(2):
        for _ in range(int(seconds / 20) - 1):
            await asyncio.sleep(10.0)
            _check_outage(world, lost=part)
        if part == 0:
            _rank_killed(world, random.Random(0), set())
            await asyncio.sleep(1.0)
    await world.heal(set())
    await world.rest(world.at_rest, "when it was back")
    parts = [daemon.parts["job-0"] for daemon in world.daemons]
    ranks = sum(len(part.present) for part in parts)
    if ranks != 3 or {part.fact.entered for part in parts} != {2}:
        raise BrokenPromiseError(f"after the outage {ranks} ranks train: {parts}")
    await _end_well(world, set())
    return trouble.asked


def _check_outage(world, lost):
    """All ranks but so many are alive, in the first generation, whose steps go on until somebody is lost."""
    parts = [daemon.parts["job-0"] for daemon in world.daemons]
    dead = sum(rank.state == EXITED for part in parts for rank in part.fact.ranks)
    if dead != lost or not all(part.computing and part.fact.entered == 1 for part in parts):
        raise BrokenPromiseError(f"{dead} ranks have ended, and {lost} were killed: {parts}")
    if any(part.fact.suspended for part in parts) != bool(lost):
        raise BrokenPromiseError(f"{lost} ranks were killed: {parts}")


async def _end_well(world, dead):
    await world.heal(dead)
    await world.rest(world.at_rest, "at rest")
    for job_id in world.submitted:
        world.cancel(job_id)
    await world.rest(world.all_over, "at the end")


def _shape(rng):
    return rng.choice((1, 1, 2)), rng.choice((1, 1, 2))


# ---- what may happen


def _submit(world, rng, dead):
    world.submit(*_shape(rng))


def _cancel(world, rng, dead):
    if world.acknowledged:
        world.cancel(rng.choice(world.acknowledged))


def _tear(world, rng, dead):
    rng.choice(world.daemons).tear()


def _silence(world, rng, dead):
    link = rng.choice(world.daemons).link
    link.silent_until = max(link.silent_until, link.loop.time() + rng.uniform(0.5, 40.0))


def _reroute(world, rng, dead):
    """A connection is held up while others pass; what it carries comes late."""
    daemon = rng.choice(world.daemons)
    if daemon.stream is not None:
        daemon.stream.lost_until = daemon.link.loop.time() + rng.uniform(0.5, 40.0)
        if rng.random() < 0.5:
            daemon.stream.tear()


def _freeze(world, rng, dead):
    daemon = rng.choice(world.daemons)
    daemon.frozen_until = max(daemon.frozen_until, daemon.link.loop.time() + rng.uniform(0.5, 40.0))


def _kill(world, rng, dead):
    daemon = rng.choice(world.daemons)
    if daemon.alive:
        daemon.kill()
        if rng.random() < 0.5:
            dead.add(daemon.node_id)
        else:
            daemon.link.loop.call_later(rng.uniform(0.0, 15.0), daemon.restart)


def _ranks_end(world, rng, dead):
    """A job ends by itself, well on all its nodes or badly on one."""
    if not world.submitted:
        return
    job_id, code = rng.choice(world.submitted), rng.choice((0, 0, 1))
    for daemon in world.daemons:
        if daemon.alive and daemon.frozen_until <= daemon.link.loop.time():
            daemon.rank_ends(job_id, code)


def _disk_full(world, rng, dead):
    world.trouble.down_until = world.daemons[0].link.loop.time() + rng.uniform(0.1, 30.0)


def _coordinator(world, rng, dead):
    world.replace(gently=rng.random() < 0.5, seconds=rng.choice((0.0, 1.0, 30.0)) * rng.random())


def _rank_killed(world, rng, dead):
    if world.submitted:
        job_id, daemon = rng.choice(world.submitted), rng.choice(world.daemons)
        part = daemon.parts.get(job_id)
        if daemon.rank_killed(job_id) and part is not None:
            world.suspend_others(job_id, daemon.node_id, part.fact.entered)


def _connection_breaks(world, rng, dead):
    """Between two engines; nobody dies, and one of them may not notice."""
    if len(world.daemons) > 1 and world.submitted:
        job_id = rng.choice(world.submitted)
        one, other = rng.sample(world.daemons, 2)
        part = one.parts.get(job_id)
        if part is not None and part.elastic and part.computing and other.node_id in part.nodes:
            one.suspend(job_id, part.fact.entered, f"{other.node_id} hung up", other.node_id)
            if rng.random() < 0.7:
                other.suspend(job_id, part.fact.entered, f"{one.node_id} hung up", one.node_id)


def _scale(world, rng, dead):
    wanted = rng.randint(1, len(world.daemons))
    world.ask(lambda job: requests.scale(job, wanted))


def _pause(world, rng, dead):
    world.ask(requests.pause)


def _resume(world, rng, dead):
    world.ask(requests.resume)


def _drain(world, rng, dead):
    world.drain(rng.choice(world.daemons).node_id, rng.random() < 0.6)


WISHES = (_scale, _scale, _pause, _resume, _resume, _drain, _drain)
LOSSES = (_rank_killed, _rank_killed, _connection_breaks, _kill, _tear, _silence)
ACTIONS = (
    _submit,
    _submit,
    _cancel,
    _tear,
    _tear,
    _silence,
    _reroute,
    _freeze,
    _kill,
    _ranks_end,
    _ranks_end,
    _disk_full,
    _coordinator,
)
