"""Generations of a job on one node, in any order with the ends of what runs there: ``Jobs`` with jobs that stand in for
the real ones, whose preparation and end come when the test says so. Real ones are in integration/node."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagua.base.retention import Keep
from bagua.daemon.node.jobs import jobs
from bagua.daemon.node.jobs.jobs import Jobs
from bagua.daemon.node.rules import events
from bagua.proto import common_pb2, node_pb2

NODE = "n"
HOW = ("here", "elsewhere", "joining")
"""A generation with ranks of this node, with none, with newcomers of this node alone."""


class StandIn:
    """A job whose preparation (or end of ranks) goes on until ``end_work``."""

    at_work: list[StandIn]

    def __init__(self, spec, node, on_report):
        self.spec, self.job_id = spec, spec.job_id
        self.stopped = self.ended_early = self.held = False
        self.numbers = {*spec.members, *spec.joining}
        self._over = asyncio.Event()
        self.began = spec.generation

    def start(self):
        assert not self.at_work, "the end of the job before this one would end this one"
        self.at_work.append(self)

    @property
    def generation(self):
        return self.spec.generation

    @property
    def ending(self):
        return self.stopped

    deserted = False

    @property
    def cleared(self):
        return self.stopped and self._over.is_set()

    async def clear(self):
        await self._over.wait()

    def post(self, event):
        if isinstance(event, events.StopRequested):  # as one that is being prepared
            self.stopped = True
        else:
            assert isinstance(event, events.EngineFailed | events.PeersKnown)

    def follow(self, spec, peers):
        assert not self.stopped
        self.spec = spec

    def end_work(self):
        """Ends the work that went on after the stop."""
        self._over.set()
        self.at_work.remove(self)

    def snapshot(self):
        return node_pb2.LocalJob(
            job_id=self.job_id,
            generation=self.generation,
            phase=node_pb2.LOCAL_PHASE_STOPPED if self.stopped else node_pb2.LOCAL_PHASE_STARTED,
        )


def directive(generation, how, elastic):
    here = node_pb2.HostPlan(node_id=NODE, address="127.0.0.1", ranks=[0], members=[0])
    there = node_pb2.HostPlan(node_id="other", address="127.0.0.1", ranks=[0], members=[90])
    joining = [node_pb2.HostPlan(node_id=NODE, ranks=[0], members=[100 + generation])]
    return node_pb2.RunJob(
        job_id="job",
        generation=generation,
        spec=common_pb2.JobSpec(entry="/x", workdir="/", nnodes=1, nproc_per_node=1, elastic=elastic),
        host_index=0 if how == "here" else 0xFFFFFFFF,
        hosts=[here if how == "here" else there],
        joining=joining if how == "joining" else [],
        job_key=bytes(32),
        master_addr="127.0.0.1",
        master_port=12345,
    )


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(jobs, "Job", StandIn)


class Node:
    """``Jobs`` with nothing below them, and the newest word of the coordinator."""

    def __init__(self, folder, elastic):
        self.elastic = elastic
        StandIn.at_work = []
        self.reported = []
        journal = SimpleNamespace(remove=lambda job_id: None)
        context = SimpleNamespace(
            node_id=NODE,
            logs_folder=folder,
            jobs_folder=folder,
            journal=journal,
            keep=Keep(),
            log=structlog.get_logger(),
        )
        self.jobs = Jobs(context, self.reported.append)
        self.newest, self.is_run, self.how = 0, False, ""

    def run(self, generation, how):
        if generation <= self.newest and not self.is_run:
            return  # words come in order, and nobody starts again what was stopped
        self.jobs.run(directive(generation, how, self.elastic))
        if generation > self.newest:
            self.newest, self.is_run, self.how = generation, True, how

    def stop(self, generation):
        self.jobs.stop(node_pb2.StopJob(job_id="job", generation=generation))
        if generation >= self.newest:
            self.newest, self.is_run = generation, False

    async def turn(self):
        for _ in range(8):
            await asyncio.sleep(0)

    def end_work(self):
        for one in [one for one in StandIn.at_work if one.stopped]:
            one.end_work()

    async def settle(self):
        for _ in range(8):
            await self.turn()
            self.end_work()

    def check(self):
        """Nothing is left of what was stopped; the newest generation runs if it was to begin here."""
        if not self.newest:
            return
        held = self.jobs.find("job")
        assert len(StandIn.at_work) <= 1
        if self.is_run and (self.how == "joining" or not self.elastic):
            assert StandIn.at_work and StandIn.at_work[0] is held and held.generation == self.newest
            assert held.spec.joining == ((100 + self.newest,) if self.how == "joining" else ())
        elif not self.is_run:
            assert not StandIn.at_work and held.stopped
        for one in StandIn.at_work:
            assert one is held and one.generation == self.newest
        assert not self.jobs._next, "somebody waits for nothing"
        if not StandIn.at_work and self.is_run:
            assert held.generation == self.newest, "the coordinator waits for a word about this generation"


STEPS = [
    *[("run", number) for number in (1, 2, 3, 4)],
    *[("stop", number) for number in (1, 2, 3, 4)],
    ("end", 0),
    ("turn", 0),
]


def play(folder, steps, hows, elastic=True):
    """``hows``: of the generations from 1 on."""

    async def main():
        node = Node(folder, elastic)
        for do, generation in steps:
            match do:
                case "run":
                    node.run(generation, hows[generation - 1])
                case "stop":
                    node.stop(generation)
                case "end":
                    node.end_work()
                case "turn":
                    await node.turn()
        await node.settle()
        node.check()

    asyncio.run(main())


def test_every_order_of_a_stopped_preparation_and_two_generations(tmp_path):
    """Generation 1 is stopped while it is prepared; the end of its preparation comes anywhere among the next words."""
    words = [("run", 2), ("stop", 2), ("run", 3)]
    for second, third in itertools.product(HOW, HOW):
        for length in range(len(words) + 1):
            for chosen in itertools.combinations(words, length):
                for place, turns in itertools.product(range(length + 1), ([], [("turn", 0)])):
                    steps = [("run", 1), ("stop", 1), *chosen[:place], ("end", 0), *turns, *chosen[place:]]
                    play(tmp_path, steps, ("here", second, third))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=14),
    hows=st.tuples(st.sampled_from(("here", "joining")), *[st.sampled_from(HOW)] * 3),
    elastic=st.booleans(),
)
def test_any_order(tmp_path, steps, hows, elastic):
    play(tmp_path, steps, hows if elastic else ("here",) * 4, elastic)
