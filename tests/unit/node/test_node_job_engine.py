"""The engine of a job follows from generation to generation, whatever is told meanwhile: with one that only notes."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import structlog

from bagua.daemon.node.jobs.job_engine import JobEngine
from bagua.daemon.node.ranks.places import OwnPlaces
from bagua.daemon.node.rules.job_specification import Host, JobSpecification, Program

ADDRESSES = ("127.0.0.1:1", "127.0.0.1:2")
SOON_S = 20.0


def specification(generation, *nodes):
    hosts = tuple(Host(node, (rank,), (rank,)) for rank, node in enumerate(nodes))
    program = Program(
        entry="train.py", is_module=False, no_python=False, args=(), env={}, secret_env={}, workdir="", python=""
    )
    return JobSpecification(
        "job", generation, 0, hosts, program, False, bytes(32), "127.0.0.1", 0, 1.0, 1.0, elastic=True
    )


class Engine:
    """``may_regroup``: set it, and it goes on."""

    def __init__(self):
        self.told = []
        self.regroups, self.may_regroup = threading.Event(), threading.Event()

    def regroup(self, generation, **_):
        self.regroups.set()
        assert self.may_regroup.wait(SOON_S)
        self.told.append(generation)

    def set_peers(self, addresses):
        self.told.append(tuple(addresses))


def job_engine(engine, tmp_path):
    node = SimpleNamespace(node_id="a", places=OwnPlaces(tmp_path, tmp_path))
    made = JobEngine(specification(1, "a", "b", "c"), node, structlog.get_logger(), lambda event: None)
    made._engine = engine
    return made


async def follow(made, engine, first, second):
    """It follows the first word; the second comes while its thread still regroups."""
    newest = [first]
    following = asyncio.create_task(made.follow(lambda: newest[-1]))
    await asyncio.to_thread(engine.regroups.wait, SOON_S)
    newest.append(second)
    if not first[1] and second[1]:  # as transitions.py does
        made.set_peers(second[0].generation, second[1])
    engine.may_regroup.set()
    await following


def test_a_generation_that_is_told_again_meanwhile_gets_its_peers(tmp_path):
    """The coordinator does so when newcomers begin to prepare, for example."""
    engine = Engine()
    next_one = specification(2, "a", "b")
    again = (replace(next_one), ADDRESSES)
    asyncio.run(follow(job_engine(engine, tmp_path), engine, (next_one, ADDRESSES), again))
    assert engine.told == [2, ADDRESSES]


def test_peers_that_come_while_it_regroups_are_those_of_the_next_generation(tmp_path):
    engine = Engine()
    next_one = specification(2, "a", "b")
    known = (replace(next_one), ADDRESSES)
    asyncio.run(follow(job_engine(engine, tmp_path), engine, (next_one, ()), known))
    assert engine.told == [2, ADDRESSES], "the generation before has other hosts"


def test_peers_of_a_later_generation_wait_for_it(tmp_path):
    engine = Engine()
    later = (specification(3, "b", "a"), ADDRESSES)
    asyncio.run(follow(job_engine(engine, tmp_path), engine, (specification(2, "a", "b"), ()), later))
    assert engine.told == [2]
