"""A daemon with an elastic job: a rank is killed, the others go on in the next generation, in the same processes."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.ranks.elastic import PROGRAM

from bagua.csrc.wire_version import WIRE_VERSION
from bagua.proto import common_pb2, node_pb2

ELSEWHERE = [
    node_pb2.HostPlan(
        node_id=f"elsewhere-{host}",
        address="127.0.0.1",
        engine_address=f"127.0.0.1:{9 + host}",
        ranks=[host],
        members=[98 + host],
    )
    for host in (0, 1)
]
"""Two hosts without this node. Nobody listens there."""
RUNNING, EXITED = common_pb2.RANK_STATE_RUNNING, common_pb2.RANK_STATE_EXITED


class Elastic:
    """The coordinator's side of one job on one node."""

    def __init__(self, end, script):
        self.end = end
        self.script = script

    async def run(self, members, generation=1, joining=(), **how):
        """``members`` are those of this node; none: the job goes on elsewhere."""
        await self.end.send(
            run=node_pb2.RunJob(
                job_id="job",
                generation=generation,
                spec=common_pb2.JobSpec(
                    entry=str(self.script),
                    workdir=str(self.script.parent),
                    nnodes=1,
                    nproc_per_node=3,
                    stop_grace_s=5.0,
                    elastic=True,
                ),
                host_index=0 if members else 0xFFFFFFFF,
                hosts=[node_pb2.HostPlan(node_id="n", address="127.0.0.1", ranks=range(len(members)), members=members)]
                if members
                else ELSEWHERE,
                joining=[node_pb2.HostPlan(node_id="n", ranks=range(len(joining)), members=joining)],
                job_key=bytes(32),
                master_addr="127.0.0.1",
                master_port=12345,
                **how,
            )
        )

    async def until(self, condition):
        """The job as it then is. It must not fail meanwhile."""
        job = await self.end.job_until("job", lambda job: condition(job) or (job.error and not job.withdrawn))
        assert condition(job), job.error
        return job

    async def all_running(self):
        return await self.until(lambda job: job.ranks and all(rank.state == RUNNING for rank in job.ranks))


@pytest.fixture
def elastic_on(end, script):
    return Elastic(end, script(PROGRAM))


@pytest.fixture
def elastic(daemon, elastic_on):
    return elastic_on


def printed(rank):
    return Path(rank.log_path).read_text().splitlines()


async def until_printed(end, ranks, line):
    """Their logs are files: nothing tells of a new line."""
    async with asyncio.timeout(60):
        for rank in ranks:
            while line(rank) not in printed(rank):
                await asyncio.sleep(0.02)


async def test_the_others_go_on_without_a_killed_rank(end, daemon, elastic):
    await elastic.run([0, 1, 2])
    job = await elastic.all_running()
    await until_printed(end, job.ranks, lambda rank: f"generation 1 rank {rank.rank} of 3 sum 3")
    pids = {rank.member: rank.pid for rank in job.ranks}
    os.kill(pids[1], signal.SIGKILL)
    job = await elastic.until(lambda job: job.suspended and job.ranks[1].state == EXITED)
    assert "rank 1" in job.suspended or "member 1" in job.suspended
    assert (job.ranks[1].signal, job.error, job.phase) == (9, "", node_pb2.LOCAL_PHASE_STARTED)
    assert [rank.state for rank in job.ranks] == [RUNNING, EXITED, RUNNING]
    await elastic.run([0, 2], generation=2)
    job = await elastic.until(lambda job: job.generation == 2)
    assert not job.suspended
    assert [(rank.rank, rank.member, rank.pid) for rank in job.ranks] == [(0, 0, pids[0]), (1, 2, pids[2])]
    await until_printed(end, job.ranks, lambda rank: f"generation 2 rank {rank.rank} of 2 sum 2")
    (elastic.script.parent / "stop").touch()
    job = await end.exited("job")
    assert [(rank.exit_code, rank.signal) for rank in job.ranks] == [(0, 0)] * 2, [r.error_tail for r in job.ranks]
    await end.stop_job("job", generation=2)
    assert (await end.stopped("job")).error == ""


def counting_steps(pause_s):
    """The program says each step, and rests so long after it."""
    pause = "        time.sleep(0.02)\n"
    assert pause in PROGRAM
    said = f"        steps.append(0)\n        print('steps', len(steps), flush=True)\n        time.sleep({pause_s})\n"
    return "steps = []\n" + PROGRAM.replace(pause, said)


async def test_a_rank_that_is_stopped_is_out(end, daemon, elastic):
    """Those that wait for it are not, however long that takes."""
    elastic.script.write_text(counting_steps(0.02))
    await elastic.run([0, 1, 2])
    job = await elastic.all_running()
    await until_printed(end, job.ranks, lambda rank: "steps 3")
    os.kill(job.ranks[1].pid, signal.SIGSTOP)
    job = await elastic.until(lambda job: job.ranks[1].state == EXITED and job.suspended)
    assert [rank.state for rank in job.ranks] == [RUNNING, EXITED, RUNNING]
    assert job.ranks[1].signal == 9 and job.ranks[1].error_tail.startswith("It was stopped (SIGSTOP) for 5 s")


async def test_a_rank_that_is_out_is_ended(end, daemon, elastic, until_gone):
    """The coordinator may have its own reason: a silent rank."""
    await elastic.run([0, 1, 2])
    job = await elastic.all_running()
    await until_printed(end, job.ranks, lambda rank: f"generation 1 rank {rank.rank} of 3 sum 3")
    out = job.ranks[2].pid
    await elastic.run([0, 1], generation=2)
    job = await elastic.until(lambda job: job.generation == 2)
    await until_gone([out])
    await until_printed(end, job.ranks, lambda rank: f"generation 2 rank {rank.rank} of 2 sum 1")
    assert end.jobs["job"].error == ""
    await end.stop_job("job", generation=2)
    await end.stopped("job")


async def test_an_exception_ends_the_job(end, daemon, elastic):
    end_of_step = "        if numbers[1]:"
    failure = "        if me == 1: raise ValueError('no')\n"
    elastic.script.write_text(PROGRAM.replace(end_of_step, failure + end_of_step))
    await elastic.run([0, 1, 2])
    job = await end.exited("job")
    assert job.ranks[1].exit_code == 1 and "ValueError: no" in job.ranks[1].error_tail
    assert all("rank 1 (pid" in rank.error_tail for rank in job.ranks if rank.rank != 1)


async def test_a_generation_after_the_first_begins_nothing_anew(end, daemon, elastic):
    """Its ranks were here once, and are no more; or never were."""
    await elastic.run([0, 1, 2], generation=2)
    job = await end.stopped("job")
    assert job.generation == 2 and not job.ranks
    await elastic.run([0, 1, 2], generation=3)
    assert (await elastic.until(lambda job: job.generation == 3)).phase == node_pb2.LOCAL_PHASE_STOPPED


async def test_a_daemon_that_is_stopped_withdraws(end, daemon, elastic):
    await elastic.run([0, 1, 2])
    await elastic.all_running()
    daemon.process.send_signal(signal.SIGTERM)
    job = await elastic.until(lambda job: job.withdrawn)
    assert "was stopped (SIGTERM)" in job.error
    assert await daemon.wait() == 0


async def begin(elastic, end):
    await end.until(lambda: end.hellos)
    await elastic.run([0, 1, 2])
    job = await elastic.all_running()
    await until_printed(end, job.ranks, lambda rank: f"generation 1 rank {rank.rank} of 3 sum 3")
    return job


def of(job, member):
    return next(rank for rank in job.ranks if rank.member == member)


async def test_a_newcomer_joins_beside_those_that_go_on(end, daemon, elastic):
    """It prepares while the others train; nobody's process is another one afterwards."""
    pids = {rank.member: rank.pid for rank in (await begin(elastic, end)).ranks}
    await elastic.until(lambda job: job.takes_newcomers and job.entered == 1)
    await elastic.run([0, 1, 2], joining=[3])
    job = await elastic.until(lambda job: len(job.ranks) == 4 and of(job, 3).ready_to_join)
    assert of(job, 3).newcomer and (job.generation, job.entered, job.suspended) == (1, 1, "")
    assert printed(of(job, 3)) == ["newcomer 0 of 1"]
    await elastic.run([0, 1, 2, 3], generation=2, planned=True)
    job = await elastic.until(lambda job: job.entered == 2 and not of(job, 3).newcomer)
    await until_printed(end, job.ranks, lambda rank: f"generation 2 rank {rank.rank} of 4 sum 6")
    assert {rank.member: rank.pid for rank in job.ranks}.items() >= pids.items()
    os.kill(of(job, 3).pid, signal.SIGKILL)
    await elastic.until(lambda job: job.suspended)
    await elastic.run([0, 1, 2], generation=3)
    job = await elastic.until(lambda job: job.entered == 3)
    await until_printed(end, job.ranks, lambda rank: f"generation 3 rank {rank.rank} of 3 sum 3")
    await end.stop_job("job", generation=3)
    await end.stopped("job")


async def test_a_newcomer_that_fails_hurts_nobody(end, daemon, elastic, until_gone):
    job = await begin(elastic, end)
    pids = [rank.pid for rank in job.ranks]
    elastic.script.write_text(
        PROGRAM.replace('    if view["newcomer"]:', "    if me == 3: raise ValueError('no')\n    if view['newcomer']:")
    )
    await elastic.run([0, 1, 2], joining=[3])
    job = await elastic.until(lambda job: len(job.ranks) == 4 and of(job, 3).state == EXITED)
    assert of(job, 3).exit_code == 1 and "ValueError: no" in of(job, 3).error_tail and of(job, 3).newcomer
    elastic.script.unlink()
    await elastic.run([0, 1, 2], joining=[4])
    job = await elastic.until(
        lambda job: len(job.ranks) == 4 and job.ranks[3].member == 4 and job.ranks[3].state == EXITED
    )
    assert "script.py does not exist" in of(job, 4).error_tail
    assert (job.error, job.suspended, job.phase) == ("", "", node_pb2.LOCAL_PHASE_STARTED)
    assert [rank.pid for rank in job.ranks[:3]] == pids
    elastic.script.write_text(PROGRAM)
    await elastic.run([0, 1, 2], joining=[5])
    job = await elastic.until(lambda job: of(job, job.ranks[-1].member).ready_to_join)
    await elastic.run([0, 1, 2])
    await until_gone([job.ranks[3].pid])
    job = await elastic.until(lambda job: len(job.ranks) == 3)
    assert [rank.state for rank in job.ranks] == [RUNNING] * 3
    await end.stop_job("job")
    await end.stopped("job")


async def test_a_node_that_joins_alone(end, daemon, elastic, rank_stub):
    """Nothing of the job was here before. Its newcomers know of nobody else, and have an engine that others reach. They
    report progress under their ranks, which are not the numbers of their processes any more."""
    await elastic.run([], generation=4, joining=[7, 8])
    job = await elastic.until(lambda job: len(job.ranks) == 2 and all(rank.ready_to_join for rank in job.ranks))
    assert (job.generation, job.entered, [rank.rank for rank in job.ranks]) == (4, 0, [0, 1])
    assert job.engine_address and printed(job.ranks[1]) == ["newcomer 1 of 2"]
    await elastic.run([], generation=5, joining=[7, 8])
    await elastic.until(lambda job: (job.generation, job.entered) == (5, 0))
    await elastic.run([7, 8], generation=6, planned=True)
    job = await elastic.until(lambda job: job.entered == 6)
    await until_printed(end, job.ranks, lambda rank: f"generation 6 rank {rank.rank} of 2 sum 15")
    await rank_stub.ReportProgress(common_pb2.Progress(job_id="job", rank=1, step=70), timeout=5)
    await end.until(lambda: [(told.rank, told.step) for told in end.progress] == [(1, 70)])
    await end.stop_job("job", generation=6)
    await end.stopped("job")


async def test_who_leaves_as_planned_ends_well(end, daemon, elastic):
    """Scaled down or drained: after a step, all of them, and the node has nothing left."""
    await begin(elastic, end)
    await elastic.run([], generation=2, planned=True)
    job = await end.stopped("job")
    assert [(rank.state, rank.exit_code, rank.signal) for rank in job.ranks] == [(EXITED, 0, 0)] * 3
    assert (job.error, job.withdrawn) == ("", False)
    assert all(printed(rank)[-1] == "dismissed" for rank in job.ranks)
    await elastic.run([], generation=2, joining=[3])
    job = await elastic.until(lambda job: len(job.ranks) == 1 and job.ranks[0].ready_to_join)
    assert job.phase == node_pb2.LOCAL_PHASE_STARTED, "it may come again"
    await end.stop_job("job", generation=2)
    await end.stopped("job")


async def test_a_pause(end, daemon, elastic):
    job = await begin(elastic, end)
    await elastic.run([0, 1, 2], generation=2, planned=True, hold=True)
    await elastic.until(lambda job: job.generation == 2)
    await elastic.run([0, 1, 2], generation=3, planned=True)
    job = await elastic.until(lambda job: job.entered == 3)
    await until_printed(end, job.ranks, lambda rank: f"generation 3 rank {rank.rank} of 3 sum 3")
    assert all("generation 2" not in line for rank in job.ranks for line in printed(rank))
    await end.stop_job("job", generation=3)
    await end.stopped("job")


async def test_drain(end, start_daemon, elastic_on):
    """The daemon waits for its jobs, says so, and goes."""
    daemon = await start_daemon("--drain-grace", "300")
    elastic = elastic_on
    await begin(elastic, end)
    assert not end.hellos[-1].status.draining
    daemon.process.send_signal(signal.SIGTERM)
    await end.until(lambda: end.statuses and end.statuses[-1].draining)
    assert [rank.state for rank in end.jobs["job"].ranks] == [RUNNING] * 3
    await elastic.run([], generation=2, planned=True)
    assert await daemon.wait() == 0
    assert (end.jobs["job"].phase, end.jobs["job"].error) == (node_pb2.LOCAL_PHASE_STOPPED, "")


async def test_a_second_signal_ends_a_drain(end, start_daemon, elastic_on):
    daemon = await start_daemon("--drain-grace", "300")
    await begin(elastic_on, end)
    daemon.process.send_signal(signal.SIGTERM)
    await end.until(lambda: end.statuses)
    daemon.process.send_signal(signal.SIGTERM)
    assert await daemon.wait() == 0
    assert end.jobs["job"].withdrawn


async def test_a_notice_that_is_shorter_than_a_step(end, start_daemon, elastic_on):
    """No plan comes about in that time: the daemon goes, with words, and its host is lost for the job."""
    daemon = await start_daemon("--drain-grace", "0.5")
    job = await begin(elastic_on, end)
    daemon.process.send_signal(signal.SIGTERM)
    await end.until(lambda: end.statuses and end.statuses[-1].draining)
    assert await daemon.wait() == 0
    found = end.jobs["job"]
    assert found.withdrawn and found.phase == node_pb2.LOCAL_PHASE_STOPPED
    assert found.error == "the daemon on node n was stopped (SIGTERM; jobs had not left it within --drain-grace 0.5)"
    assert [rank.state for rank in found.ranks] == [EXITED] * 3
    assert not any(Path(f"/proc/{rank.pid}").exists() for rank in job.ranks)


async def restarted(end, elastic, daemon):
    """Kills the daemon below its keeper; the job as the next one finds it."""
    known = len(end.hellos)
    daemon.proper().kill()
    await end.until(lambda: len(end.hellos) > known)
    assert end.hellos[-1].boot_id == end.hellos[-2].boot_id and end.hellos[-1].stream > end.hellos[-2].stream
    return end.hellos[-1].jobs[0]


async def test_ranks_outlive_their_daemon(end, daemon, elastic):
    """SIGKILL of the daemon: the same processes, their memory and their logs go on in the next generation."""
    job = await begin(elastic, end)
    pids = [rank.pid for rank in job.ranks]
    for generation in (2, 3):
        job = await restarted(end, elastic, daemon)
        assert (job.generation, job.entered, job.error) == (generation - 1, generation - 1, "")
        assert "was killed and started again" in job.suspended and job.takes_newcomers
        assert [(rank.pid, rank.state) for rank in job.ranks] == [(pid, RUNNING) for pid in pids]
        await elastic.run([0, 1, 2], generation=generation)
        job = await elastic.until(lambda job, wanted=generation: job.entered == wanted)
        await until_printed(
            end, job.ranks, lambda rank, now=generation: f"generation {now} rank {rank.rank} of 3 sum 3"
        )
    assert [printed(rank)[0] for rank in job.ranks] == [f"generation 1 rank {n} of 3 sum 3" for n in range(3)]
    os.kill(pids[1], signal.SIGKILL)
    job = await elastic.until(lambda job: job.suspended and job.ranks[1].state == EXITED)
    assert job.ranks[1].signal == 9
    await elastic.run([0, 2], generation=4)
    job = await elastic.until(lambda job: job.entered == 4)
    await until_printed(end, job.ranks, lambda rank: f"generation 4 rank {rank.rank} of 2 sum 2")
    (elastic.script.parent / "stop").touch()
    job = await end.exited("job")
    assert [(rank.exit_code, rank.signal) for rank in job.ranks] == [(0, 0)] * 2
    await end.stop_job("job", generation=4)
    assert (await end.stopped("job")).error == ""


async def test_an_exit_while_there_is_no_daemon_is_told(end, daemon, elastic):
    job = await begin(elastic, end)
    os.kill(daemon.pid, signal.SIGSTOP)  # the keeper starts the next one when both have ended
    try:
        daemon.proper().kill()
        os.kill(job.ranks[2].pid, signal.SIGKILL)
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    job = await elastic.until(lambda job: job.suspended and job.ranks[2].state == EXITED)
    assert job.ranks[2].signal == 9 and [rank.state for rank in job.ranks[:2]] == [RUNNING] * 2
    await elastic.run([0, 1], generation=2)
    job = await elastic.until(lambda job: job.entered == 2)
    await until_printed(end, job.ranks, lambda rank: f"generation 2 rank {rank.rank} of 2 sum 1")
    await end.stop_job("job", generation=2)
    await end.stopped("job")


async def test_ranks_die_with_the_keeper(end, daemon, elastic, until_gone):
    job = await begin(elastic, end)
    pids = [*(rank.pid for rank in job.ranks), daemon.proper().pid]
    daemon.kill()
    await until_gone(pids)


async def test_an_upgrade_is_a_new_daemon_below_the_same_keeper(end, daemon, elastic):
    job = await begin(elastic, end)
    pids, known, former = [rank.pid for rank in job.ranks], len(end.hellos), daemon.proper().pid
    await end.send(upgrade=node_pb2.Upgrade(request_id=7))
    await end.until(lambda: len(end.hellos) > known)
    assert daemon.proper().pid != former and [hello.life for hello in end.hellos] == [1, 2]
    await elastic.run([0, 1, 2], generation=2)
    job = await elastic.until(lambda job: job.entered == 2)
    await until_printed(end, job.ranks, lambda rank: f"generation 2 rank {rank.rank} of 3 sum 3")
    assert [rank.pid for rank in job.ranks] == pids
    await end.stop_job("job", generation=2)
    await end.stopped("job")


async def test_an_upgrade_that_can_not_be(end, start_daemon, script, monkeypatch, tmp_path):
    """The daemon stays, and says why: for ranks that would not wait, and for an installation that does not start."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the keeper, too
    await start_daemon()
    await end.run_script("fixed", script("import time\nprint('up', flush=True)\ntime.sleep(600)\n"))
    await end.job_until("fixed", lambda job: job.ranks and job.ranks[0].state == RUNNING)
    await end.send(upgrade=node_pb2.Upgrade(request_id=1))
    await end.until(lambda: end.refusals)
    assert (end.refusals[0].request_id, end.refusals[0].reason[:5]) == (1, "fixed")
    await end.stop_job("fixed")
    await end.stopped("fixed")
    (tmp_path / "sitecustomize.py").write_text("raise SystemExit('broken')\n")
    await end.send(upgrade=node_pb2.Upgrade(request_id=2))
    await end.until(lambda: len(end.refusals) > 1)
    assert end.refusals[1].request_id == 2 and "can not start" in end.refusals[1].reason
    assert len(end.hellos) == 1


NEWER = "import bagua.csrc.wire_version as own\nown.WIRE_VERSION += 1\n"
"""Makes each Python that starts one of a release that does not talk with this one."""


async def test_an_upgrade_to_a_release_that_can_not_talk_with_the_ranks(end, start_daemon, elastic_on, newer):
    """It is refused, with both versions. Where the daemon is killed then, the node's part of the job ends."""
    daemon = await start_daemon()
    await begin(elastic_on, end)
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
    assert job.phase == node_pb2.LOCAL_PHASE_STOPPED and job.withdrawn
    words = f"(wire version {WIRE_VERSION + 1}), can't talk with ranks of wire version {WIRE_VERSION}"
    assert job.error.endswith(words)


async def test_a_daemon_that_does_not_understand_its_keeper_says_so(end, start_daemon, newer):
    """Another release was installed, and the daemon is killed: the node ends."""
    daemon = await start_daemon()
    newer.write_text("import bagua.daemon.node.keeper.wire as own\nown.VERSION += 1\n")
    daemon.proper().kill()
    assert await daemon.wait() == 2
    assert "start the node again. [BG924]" in daemon.errors.read_text() and len(end.hellos) == 1


async def test_ranks_wait_for_a_daemon_that_can_not_start(end, start_daemon, elastic_on, newer, tmp_path):
    """Its disk is read-only, for example. Without ranks the node would end."""
    daemon = await start_daemon()
    job = await begin(elastic_on, end)
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


async def test_an_upgrade_to_a_release_that_can_not_talk_is_one_where_no_rank_runs(end, start_daemon, newer):
    await start_daemon()
    newer.write_text(NEWER)
    await end.send(upgrade=node_pb2.Upgrade(request_id=1))
    await end.until(lambda: len(end.hellos) > 1)
    assert [hello.wire_version for hello in end.hellos] == [WIRE_VERSION, WIRE_VERSION + 1] and not end.refusals


@pytest.fixture
def newer(monkeypatch, tmp_path):
    """A file that each Python runs which starts from now on, below the keeper, too."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "newer"))
    (tmp_path / "newer").mkdir()
    return tmp_path / "newer" / "sitecustomize.py"


async def test_newcomers_do_not_outlive_the_daemon(end, daemon, elastic, until_gone):
    """It is said why; that they were to enter the next generation fails nobody."""
    await begin(elastic, end)
    await elastic.run([0, 1, 2], joining=[3])
    job = await elastic.until(lambda job: len(job.ranks) == 4 and of(job, 3).ready_to_join)
    newcomer = of(job, 3).pid
    job = await restarted(end, elastic, daemon)
    assert of(job, 3).newcomer and (of(job, 3).state, of(job, 3).signal) == (EXITED, 9)
    assert of(job, 3).error_tail.startswith("Its daemon was started again while it prepared to join")
    await until_gone([newcomer])
    await elastic.run([0, 1, 2, 3], generation=2, planned=True)  # as if it had been decided just before
    await elastic.run([0, 1, 2], generation=3, joining=[4])
    job = await elastic.until(lambda job: job.entered == 3 and of(job, 4).ready_to_join)
    await elastic.run([0, 1, 2, 4], generation=4, planned=True)
    job = await elastic.until(lambda job: job.entered == 4 and not of(job, 4).newcomer)
    await until_printed(end, job.ranks, lambda rank: f"generation 4 rank {rank.rank} of 4 sum 7")
    await end.stop_job("job", generation=4)
    await end.stopped("job")


async def test_who_was_dismissed_comes_to_an_end_without_its_daemon(end, daemon, elastic):
    """Its exit code is told by the next one."""
    slow = PROGRAM + "while not os.path.exists('go'):\n    time.sleep(0.01)\nsys.exit(3)\n"
    elastic.script.write_text(slow)
    await begin(elastic, end)
    await elastic.run([0, 1], generation=2, planned=True)
    job = await elastic.until(lambda job: job.entered == 2)
    await until_printed(end, [of(job, 2)], lambda rank: "dismissed")
    job = await restarted(end, elastic, daemon)
    assert of(job, 2).state == RUNNING
    (elastic.script.parent / "go").touch()
    job = await elastic.until(lambda job: of(job, 2).state == EXITED)
    assert (of(job, 2).exit_code, of(job, 2).signal) == (3, 0)
    await elastic.run([0, 1], generation=3)
    await elastic.until(lambda job: job.entered == 3)
    await end.stop_job("job", generation=3)
    await end.stopped("job")
