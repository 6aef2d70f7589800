"""The cost of a job grows with its nodes, and not with their square: four times the nodes, at most five times the time.

Simulated nodes answer a few at a time, as real ones do. What counts is the coordinator's processor time, so other work
on the machine changes both sides of the ratio alike."""

import asyncio
import time

import pytest
from rig.coordinator.desk import Desk, at_work

from bagua.daemon.coordinator.rules.domain import JobState, LocalJob, LocalRank, Phase, RankState
from bagua.daemon.coordinator.rules.options import Options
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.proto import common_pb2, node_pb2

RANKS = 8
AT_ONCE = 5  # nodes that answer between two turns of the coordinator
MOST = 5.0  # times the cost, for four times the nodes
MOST_BYTES = 20  # that a node is told of each host, in two messages


class Nodes:
    """Nodes that do what they are told. ``own_s``: their own processor time, which is not the coordinator's."""

    def __init__(self, desk, job_id):
        self.desk, self.job_id = desk, job_id
        self.sessions = []
        self.own_s = 0.0
        self.told = 0  # bytes of directives

    async def answer(self):
        """Each in turn takes its directives, and says how far it is."""
        for number, session in enumerate(self.sessions):
            before = time.thread_time()
            while not session.outgoing.empty():
                data = session.outgoing.get_nowait()
                assert isinstance(data, bytes)
                self.told += len(data)
                self._obey(session, node_pb2.Directive.FromString(data))
            self.own_s += time.thread_time() - before
            if number % AT_ONCE == 0:
                await asyncio.sleep(0.001)

    def _obey(self, session, directive):
        first = int(session.node_id[1:]) * RANKS
        ranks = range(first, first + RANKS)
        if directive.HasField("stop"):
            ended = tuple(LocalRank(rank, RankState.EXITED, 7, -15, 15) for rank in ranks)
            self.desk.intake.fact(session, LocalJob(self.job_id, 1, Phase.STOPPED, ranks=ended))
            return
        running = tuple(LocalRank(rank, RankState.RUNNING, 7) for rank in ranks)
        address = f"10.0.{first >> 8}.{first & 255}:{10_000 + first}"
        self.desk.intake.fact(session, LocalJob(self.job_id, 1, Phase.STARTED, address, ranks=running))


async def cost(folder, count):
    """Of a job over ``count`` nodes, from nothing to its end: seconds, bytes that a node is told."""
    engine = open_engine(sqlite_url(folder / f"{count}.db"))
    async with at_work(Desk(engine, options=Options(lease_s=10_000, settle_s=1))) as desk:
        nodes = Nodes(desk, "job-1")
        for start in range(0, count, 50):
            names = [f"n{number:05}" for number in range(start, min(start + 50, count))]
            nodes.sessions += await asyncio.gather(*(desk.connect(name, RANKS) for name in names))
        for session in nodes.sessions:
            session.unpacks = True
        began = time.process_time()
        wanted = common_pb2.JobSpec(entry="t.py", nnodes=count, nproc_per_node=RANKS)
        await desk.service.submit(checked_spec(wanted), "", nodes.job_id)
        for state in (JobState.RUNNING, None):
            while getattr(desk.board.job(nodes.job_id), "state", None) is not state:
                await nodes.answer()
            if state is JobState.RUNNING:
                await desk.service.cancel(nodes.job_id, "enough")
        spent = time.process_time() - began - nodes.own_s
    engine.dispose()
    return spent, nodes.told / count


@pytest.mark.full  # ten seconds of a core
def test_four_times_the_nodes_cost_at_most_five_times_the_time(tmp_path):
    few = 250
    seconds = {few: [], 4 * few: []}
    for turn in range(4):  # in turns, and the best of each: whatever else runs makes none of them quicker
        for count, found in seconds.items():
            folder = tmp_path / f"{turn}-{count}"
            folder.mkdir()
            spent, told = asyncio.run(cost(folder, count))
            found.append(spent)
            assert told <= MOST_BYTES * count
        if turn and min(seconds[4 * few]) <= MOST * min(seconds[few]):
            return
    raise AssertionError(seconds)
