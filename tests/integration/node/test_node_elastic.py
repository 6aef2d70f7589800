"""A daemon with an elastic job: a rank is killed, the others go on in the next generation, in the same processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.node_daemon import printed, until_gone, until_printed
from rig.ranks.elastic import PROGRAM

from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import common_pb2, node_pb2

RUNNING, EXITED = common_pb2.RANK_STATE_RUNNING, common_pb2.RANK_STATE_EXITED
STARTED, STOPPED = node_pb2.LOCAL_PHASE_STARTED, node_pb2.LOCAL_PHASE_STOPPED


class Elastic:
    """The coordinator's side of one job on one node."""

    def __init__(self, end, script):
        self.end, self.script = end, script

    async def run(self, members, generation=1, **how):
        """``members`` are those of this node; none: the job goes on elsewhere."""
        place = {"entry": str(self.script), "workdir": str(self.script.parent), "nproc_per_node": 3}
        await self.end.run_members(members, generation, **place, **how)

    async def until(self, condition):
        """The job as it then is. It must not fail meanwhile."""
        job = await self.end.job_until("job", lambda job: condition(job) or (job.error and not job.withdrawn))
        assert condition(job), job.error
        return job

    async def enters(self, generation, members, **how):
        """The job once its members compute in this generation."""
        await self.run(members, generation, **how)
        job = await self.until(
            lambda job: job.entered == generation and all(rank.pid and rank.log_path for rank in job.ranks)
        )
        ranks = [rank for rank in job.ranks if rank.member in members]
        last = f"of {len(members)} sum {sum(members)}"
        await until_printed(ranks, lambda rank: f"generation {generation} rank {rank.rank} {last}")
        return job

    async def begins(self, members=(0, 1)):
        await self.end.until(lambda: self.end.hellos)
        return await self.enters(1, members)

    async def ends_well(self, generation):
        (self.script.parent / "stop").touch()
        job = await self.end.exited("job")
        assert {(rank.exit_code, rank.signal) for rank in job.ranks} == {(0, 0)}, [r.error_tail for r in job.ranks]
        assert (await self.end.end_job(generation=generation)).error == ""

    async def restarts(self, daemon):
        """Kills the daemon below its keeper; the job as the next one finds it."""
        known = len(self.end.hellos)
        daemon.proper().kill()
        await self.end.until(lambda: len(self.end.hellos) > known)
        before, now = self.end.hellos[-2:]
        assert now.boot_id == before.boot_id and now.stream > before.stream
        return now.jobs[0]


@pytest.fixture
def elastic(end, script):
    return Elastic(end, script(PROGRAM))


@pytest.fixture
def newer(monkeypatch, tmp_path):
    """A file that each Python runs which starts from now on, below the keeper, too."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "newer"))
    (tmp_path / "newer").mkdir()
    return tmp_path / "newer" / "sitecustomize.py"


NEWER = "import bagua.csrc.wire_version as own\nown.WIRE_VERSION += 1\n"
"""Makes each Python that starts one of a release that does not talk with this one."""


def of(job, member):
    return next(rank for rank in job.ranks if rank.member == member)


async def test_the_others_go_on_without_a_killed_rank(end, daemon, elastic):
    """One that is out, as the coordinator may have its own reason, is ended."""
    job = await elastic.begins([0, 1, 2])
    pids = {rank.member: rank.pid for rank in job.ranks}
    os.kill(pids[1], signal.SIGKILL)
    job = await elastic.until(lambda job: job.suspended and job.ranks[1].state == EXITED)
    assert "rank 1" in job.suspended or "member 1" in job.suspended
    assert (job.ranks[1].signal, job.error, job.phase) == (9, "", STARTED)
    assert [rank.state for rank in job.ranks] == [RUNNING, EXITED, RUNNING]
    job = await elastic.enters(2, [0, 2])
    assert not job.suspended
    assert [(rank.rank, rank.member, rank.pid) for rank in job.ranks] == [(0, 0, pids[0]), (1, 2, pids[2])]
    await elastic.enters(3, [0])
    await until_gone([pids[2]])
    await elastic.ends_well(3)


async def test_a_rank_that_is_stopped_is_out(end, daemon, elastic):
    """Those that wait for it are not, however long that takes."""
    pause = "        time.sleep(0.02)\n"
    count = f"        steps.append(0)\n        print('steps', len(steps), flush=True)\n{pause}"
    assert pause in PROGRAM
    elastic.script.write_text("steps = []\n" + PROGRAM.replace(pause, count))
    job = await elastic.begins()
    await until_printed(job.ranks, "steps 3")
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    job = await elastic.until(lambda job: job.ranks[1].state == EXITED and job.suspended)
    assert job.ranks[0].state == RUNNING
    assert job.ranks[1].signal == 9 and job.ranks[1].error_tail.startswith("It was stopped (SIGSTOP) for 5 s")


async def test_an_exception_ends_the_job(end, daemon, elastic):
    end_of_step = "        if numbers[1]:"
    failure = "        if me == 1: raise ValueError('no')\n"
    elastic.script.write_text(PROGRAM.replace(end_of_step, failure + end_of_step))
    await elastic.run([0, 1])
    job = await end.exited("job")
    assert job.ranks[1].exit_code == 1 and "ValueError: no" in job.ranks[1].error_tail
    assert "rank 1 (pid" in job.ranks[0].error_tail


async def test_a_generation_after_the_first_begins_nothing_anew(end, daemon, elastic):
    """Its ranks were here once, and are no more; or never were."""
    for generation in (2, 3):
        await elastic.run([0, 1, 2], generation)
        job = await elastic.until(lambda job, now=generation: (job.generation, job.phase) == (now, STOPPED))
        assert not job.ranks


STOPS = [
    ((), 1, "the daemon on node n was stopped (SIGTERM)"),
    (("--drain-grace", "300"), 2, "the daemon on node n was stopped (SIGTERM"),
    (
        ("--drain-grace", "0.5"),
        1,
        "the daemon on node n was stopped (SIGTERM; jobs had not left it within --drain-grace 0.5)",
    ),
]


@pytest.mark.parametrize(("options", "signals", "words"), STOPS, ids=["at once", "a second signal", "a short notice"])
async def test_a_daemon_that_is_stopped_withdraws(end, start_daemon, elastic, options, signals, words):
    """Its host is lost for the job: no plan has come about in that time."""
    daemon = await start_daemon(*options)
    job = await elastic.begins()
    for number in range(signals):
        await end.until(lambda number=number: len(end.statuses) >= number)
        daemon.process.send_signal(signal.SIGTERM)
    assert await daemon.wait() == 0
    assert not options or end.statuses[-1].draining
    found = end.jobs["job"]
    assert found.withdrawn and found.phase == STOPPED and found.error.startswith(words)
    assert [rank.state for rank in found.ranks] == [EXITED] * 2
    assert not any(Path(f"/proc/{rank.pid}").exists() for rank in job.ranks)


async def test_planned_changes(end, daemon, elastic):
    """A newcomer joins, and prepares while the others train; a pause; all leave the node: nobody's process is another
    one afterwards."""
    pids = {rank.member: rank.pid for rank in (await elastic.begins()).ranks}
    await elastic.until(lambda job: job.takes_newcomers)
    await elastic.run([0, 1], joining=[2])
    job = await elastic.until(lambda job: len(job.ranks) == 3 and of(job, 2).ready_to_join)
    assert of(job, 2).newcomer and (job.generation, job.entered, job.suspended) == (1, 1, "")
    assert printed(of(job, 2)) == ["newcomer 0 of 1"]
    job = await elastic.enters(2, [0, 1, 2], planned=True)
    await elastic.until(lambda job: not of(job, 2).newcomer)
    assert {rank.member: rank.pid for rank in job.ranks}.items() >= pids.items()
    os.kill(of(job, 2).pid, signal.SIGKILL)
    await elastic.until(lambda job: job.suspended)
    await elastic.enters(3, [0, 1])

    await elastic.run([0, 1], 4, planned=True, hold=True)
    await elastic.until(lambda job: job.generation == 4)
    job = await elastic.enters(5, [0, 1], planned=True)
    assert all("generation 4" not in line for rank in job.ranks for line in printed(rank))

    await elastic.run([], 6, planned=True)
    job = await end.stopped("job")
    assert [(rank.state, rank.exit_code, rank.signal) for rank in job.ranks] == [(EXITED, 0, 0)] * 2
    assert (job.error, job.withdrawn) == ("", False)
    assert all(printed(rank)[-1] == "dismissed" for rank in job.ranks)
    await elastic.run([], 6, joining=[3])
    job = await elastic.until(lambda job: len(job.ranks) == 1 and job.ranks[0].ready_to_join)
    assert job.phase == STARTED, "it may come again"


async def test_a_newcomer_that_fails_hurts_nobody(end, daemon, elastic):
    pids = [rank.pid for rank in (await elastic.begins()).ranks]

    async def joins(member, text, condition):
        """The job, once a newcomer with this program (none: it is gone) is as ``condition`` says."""
        elastic.script.write_text(text) if text else elastic.script.unlink()
        await elastic.run([0, 1], joining=[member])
        return await elastic.until(
            lambda job: len(job.ranks) == 3 and job.ranks[2].member == member and condition(job.ranks[2])
        )

    begin = '    if view["newcomer"]:'
    fails = PROGRAM.replace(begin, f"    if me == 3: raise ValueError('no')\n{begin}")
    job = await joins(3, fails, lambda rank: rank.state == EXITED)
    assert job.ranks[2].exit_code == 1 and "ValueError: no" in job.ranks[2].error_tail and job.ranks[2].newcomer
    job = await joins(4, "", lambda rank: rank.state == EXITED)
    assert "script.py does not exist" in job.ranks[2].error_tail
    assert (job.error, job.suspended, job.phase) == ("", "", STARTED)
    assert [rank.pid for rank in job.ranks[:2]] == pids
    job = await joins(5, PROGRAM, lambda rank: rank.ready_to_join)
    await elastic.run([0, 1])
    await until_gone([job.ranks[2].pid])
    job = await elastic.until(lambda job: len(job.ranks) == 2)
    assert [rank.state for rank in job.ranks] == [RUNNING] * 2


async def test_a_node_that_joins_alone(end, daemon, elastic, rank_stub):
    """Nothing of the job was here before. Its newcomers know of nobody else, and have an engine that others reach. They
    report progress under their ranks, which are not the numbers of their processes any more."""
    await elastic.run([], 4, joining=[7, 8])
    job = await elastic.until(lambda job: len(job.ranks) == 2 and all(rank.ready_to_join for rank in job.ranks))
    assert (job.generation, job.entered, [rank.rank for rank in job.ranks]) == (4, 0, [0, 1])
    assert job.engine_address and printed(job.ranks[1]) == ["newcomer 1 of 2"]
    await elastic.run([], 5, joining=[7, 8])
    await elastic.until(lambda job: (job.generation, job.entered) == (5, 0))
    await elastic.enters(6, [7, 8], planned=True)
    await rank_stub.ReportProgress(common_pb2.Progress(job_id=f"{end.prefix}job", rank=1, step=70), timeout=5)
    await end.until(lambda: [(told.rank, told.step) for told in end.progress] == [(1, 70)])


async def test_drain(end, start_daemon, elastic):
    """The daemon waits for its jobs, says so, and goes."""
    daemon = await start_daemon("--drain-grace", "300")
    await elastic.begins()
    assert not end.hellos[-1].status.draining
    daemon.process.send_signal(signal.SIGTERM)
    await end.until(lambda: end.statuses and end.statuses[-1].draining)
    assert [rank.state for rank in end.jobs["job"].ranks] == [RUNNING] * 2
    await elastic.run([], 2, planned=True)
    assert await daemon.wait() == 0
    assert (end.jobs["job"].phase, end.jobs["job"].error) == (STOPPED, "")


async def test_ranks_outlive_their_daemon(end, start_daemon, elastic):
    """SIGKILL of the daemon: the same processes, their memory and their logs go on in the next generation. An exit
    while there is no daemon is told by the next one."""
    daemon = await start_daemon()
    members = [0, 1, 2]
    pids = [rank.pid for rank in (await elastic.begins(members)).ranks]
    for generation in (2, 3):
        job = await elastic.restarts(daemon)
        assert (job.generation, job.entered, job.error) == (generation - 1, generation - 1, "")
        assert "was killed and started again" in job.suspended and job.takes_newcomers
        assert [(rank.pid, rank.state) for rank in job.ranks] == [(pid, RUNNING) for pid in pids]
        job = await elastic.enters(generation, members)
    assert [printed(rank)[0] for rank in job.ranks] == [f"generation 1 rank {n} of 3 sum 3" for n in members]
    os.kill(daemon.pid, signal.SIGSTOP)  # the keeper starts the next one when both have ended
    try:
        daemon.proper().kill()
        os.kill(pids[1], signal.SIGKILL)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    job = await elastic.until(lambda job: job.suspended and job.ranks[1].state == EXITED)
    assert job.ranks[1].signal == 9 and [job.ranks[n].state for n in (0, 2)] == [RUNNING] * 2
    await elastic.enters(4, [0, 2])
    await elastic.ends_well(4)


async def test_an_upgrade_is_a_new_daemon_below_the_same_keeper(end, start_daemon, elastic):
    """With which ranks die."""
    daemon = await start_daemon()
    pids, former = [rank.pid for rank in (await elastic.begins()).ranks], daemon.proper().pid
    await end.send(upgrade=node_pb2.Upgrade(request_id=7))
    await end.until(lambda: len(end.hellos) > 1)
    assert daemon.proper().pid != former and [hello.life for hello in end.hellos] == [1, 2]
    assert [rank.pid for rank in (await elastic.enters(2, [0, 1])).ranks] == pids
    pids.append(daemon.proper().pid)
    daemon.kill()
    await until_gone(pids)


async def test_an_upgrade_that_can_not_be(end, start_daemon, script, newer):
    """The daemon stays, and says why: for ranks that would not wait, and for an installation that does not start."""
    await start_daemon()
    await end.run_script("fixed", script("import time\ntime.sleep(600)\n"))
    await end.runs("fixed")
    await end.send(upgrade=node_pb2.Upgrade(request_id=1))
    await end.until(lambda: end.refusals)
    assert (end.refusals[0].request_id, end.refusals[0].reason[:5]) == (1, "fixed")
    await end.end_job("fixed")
    newer.write_text("raise SystemExit('broken')\n")
    await end.send(upgrade=node_pb2.Upgrade(request_id=2))
    await end.until(lambda: len(end.refusals) > 1)
    assert end.refusals[1].request_id == 2 and "can not start" in end.refusals[1].reason
    assert len(end.hellos) == 1


async def test_an_upgrade_to_a_release_that_can_not_talk_with_the_ranks(end, start_daemon, elastic, newer):
    """It is refused, with both versions. Where the daemon is killed then, the node's part of the job ends."""
    daemon = await start_daemon()
    await elastic.begins()
    newer.write_text(NEWER)
    await end.send(upgrade=node_pb2.Upgrade(request_id=1))
    await end.until(lambda: end.refusals)
    assert f"(wire version {WIRE_VERSION + 1}), which can't talk with ranks of bagua" in end.refusals[0].reason
    assert f"(wire version {WIRE_VERSION}): drain the node" in end.refusals[0].reason
    assert len(end.hellos) == 1 and end.hellos[0].wire_version == WIRE_VERSION
    daemon.proper().kill()
    await end.until(lambda: len(end.hellos) > 1)
    assert end.hellos[1].wire_version == WIRE_VERSION + 1
    (job,) = end.hellos[1].jobs
    assert job.phase == STOPPED and job.withdrawn
    words = f"(wire version {WIRE_VERSION + 1}), can't talk with ranks of wire version {WIRE_VERSION}"
    assert job.error.endswith(words)


async def test_an_upgrade_to_a_release_that_can_not_talk_is_one_where_no_rank_runs(end, start_daemon, newer):
    """Then one is installed that does not understand its keeper, and the daemon is killed: the node ends in words."""
    daemon = await start_daemon()
    newer.write_text(NEWER)
    await end.send(upgrade=node_pb2.Upgrade(request_id=1))
    await end.until(lambda: len(end.hellos) > 1)
    assert [hello.wire_version for hello in end.hellos] == [WIRE_VERSION, WIRE_VERSION + 1] and not end.refusals
    newer.write_text("import bagua.daemon.node.keeper.wire as own\nown.VERSION += 1\n")
    daemon.proper().kill()
    assert await daemon.wait() == 2
    assert "start the node again. [BG924]" in daemon.log() and len(end.hellos) == 2


async def test_ranks_wait_for_a_daemon_that_can_not_start(end, start_daemon, elastic, newer, tmp_path):
    """Its disk is read-only, for example. Without ranks the node would end."""
    daemon = await start_daemon()
    job = await elastic.begins()
    newer.write_text(f"open({str(tmp_path / 'tried')!r}, 'a').write('x')\nraise SystemExit('the disk is read-only')\n")
    daemon.proper().kill()
    async with asyncio.timeout(SOON_S):
        while not (tmp_path / "tried").exists() or len((tmp_path / "tried").read_text()) < 7:
            await asyncio.sleep(0.05)
    newer.unlink()
    await end.until(lambda: len(end.hellos) > 1)
    (again,) = end.hellos[1].jobs
    assert [rank.pid for rank in again.ranks] == [rank.pid for rank in job.ranks] and not again.error
    newer.write_text("raise SystemExit('the disk is read-only')\n")
    daemon.proper().kill()
    for rank in job.ranks:
        os.kill(rank.pid, signal.SIGKILL)
    assert await daemon.wait() == 1, "nobody waits for it any more"


async def test_who_comes_and_who_leaves_when_the_daemon_is_killed(end, start_daemon, elastic):
    """A newcomer does not outlive it, and it is said why; that it was to enter the next generation fails nobody. Who
    was dismissed comes to an end, and its exit code is told by the next daemon."""
    daemon = await start_daemon()
    elastic.script.write_text(PROGRAM + "while not os.path.exists('go'):\n    time.sleep(0.01)\nsys.exit(3)\n")
    await elastic.begins()
    await elastic.run([0, 1], joining=[2])
    newcomer = of(await elastic.until(lambda job: len(job.ranks) == 3 and of(job, 2).ready_to_join), 2).pid
    job = await elastic.restarts(daemon)
    assert of(job, 2).newcomer and (of(job, 2).state, of(job, 2).signal) == (EXITED, 9)
    assert of(job, 2).error_tail.startswith("Its daemon was started again while it prepared to join")
    await until_gone([newcomer])
    await elastic.run([0, 1, 2], 2, planned=True)  # as if it had been decided just before
    await elastic.run([0, 1], 3, joining=[3])
    await elastic.until(lambda job: job.entered == 3 and of(job, 3).ready_to_join)
    await elastic.enters(4, [0, 1, 3], planned=True)
    await elastic.until(lambda job: not of(job, 3).newcomer)

    job = await elastic.enters(5, [0, 3], planned=True)
    await until_printed([of(job, 1)], "dismissed")
    assert of(await elastic.restarts(daemon), 1).state == RUNNING
    (elastic.script.parent / "go").touch()
    job = await elastic.until(lambda job: of(job, 1).state == EXITED)
    assert (of(job, 1).exit_code, of(job, 1).signal) == (3, 0)
    await elastic.enters(6, [0, 3])
