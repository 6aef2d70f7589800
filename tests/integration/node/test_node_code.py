"""Code that is shipped, on the node: fetched once, checked, a copy for each job, gone after it."""

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.ranks.elastic import PROGRAM

from bagua.base.code_archive import PIECE_BYTES
from bagua.client import pack
from bagua.daemon.node.rules.job_specification import NO_HOST
from bagua.proto import common_pb2, node_pb2

SCRIPT = """
import os, pathlib, time
from lib.words import word
print(word, os.getcwd(), flush=True)
pathlib.Path("made-" + os.environ["RANK"]).touch()
while not pathlib.Path("made-" + os.environ["RANK"]).with_name("end").exists() and "KEEP" in os.environ:
    time.sleep(0.02)
"""


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "words.py").write_text("word = 'shipped'\n")
    (folder / "train.py").write_text(SCRIPT)
    (folder / "large.bin").write_bytes(bytes(hashlib.shake_128(b"x").digest(PIECE_BYTES + 5)))  # two pieces
    return folder


def archive_in(end, folder):
    packed = pack(folder)
    end.code = b"".join(packed.parts(1 << 20))
    return packed.archive


def printed(job):
    return [Path(rank.log_path).read_text().split()[0] for rank in job.ranks]


async def test_ranks_run_in_a_copy(end, daemon, state, project):
    archive = archive_in(end, project)
    await end.run_script("one", "train.py", nproc=2, code=archive)
    job = await end.exited("one")
    assert [rank.exit_code for rank in job.ranks] == [0, 0], job.ranks[0].error_tail
    assert printed(job) == ["shipped"] * 2
    folder = Path(job.ranks[0].log_path).read_text().split()[1]
    assert Path(folder).is_relative_to(state) and (Path(folder) / "made-1").exists()
    assert Path(folder).stat().st_mode & 0o777 == 0o700
    assert end.code_questions == [("one", 0), ("one", 1)]
    await end.stop_job("one")
    await end.stopped("one")
    assert not Path(folder).exists() and Path(job.ranks[0].log_path).exists()
    # Another job in the same code: nothing is fetched. Its working directory lies below the root.
    await end.run_script("two", "words.py", code=archive, workdir="lib")
    job = await end.exited("two")
    assert [rank.exit_code for rank in job.ranks] == [0] and len(end.code_questions) == 2
    await end.stop_job("two")
    await end.stopped("two")


async def test_code_that_is_not_that_of_the_job(end, daemon, state, project):
    archive = archive_in(end, project)
    good = end.code
    for name, bad, words in (
        ("other", good[:-1] + b"x", "its SHA-256 differs"),
        ("short", good[: PIECE_BYTES // 2], "another number of bytes"),
        ("gone", None, "can't be fetched: not here"),
    ):
        end.code = bad
        await end.run_script(name, "train.py", code=archive)
        job = await end.stopped(name)
        assert words in job.error, job.error
    end.code = good
    await end.run_script("absent", "absent.py", code=archive)
    assert "absent.py does not exist" in (await end.stopped("absent")).error
    assert not list(state.rglob("jobs/*/code"))
    for name, code, more, words in (
        ("path", common_pb2.CodeArchive(digest="../x", bytes=3), {}, "no SHA-256"),
        ("out", archive, {"workdir": "../.."}, "leads out"),
    ):
        await end.run_script(name, "train.py", code=code, **more)
        assert words in (await end.stopped(name)).error


async def until_printed(rank, text):
    """Its log is a file: nothing tells of a new line."""
    async with asyncio.timeout(60):
        while text not in Path(rank.log_path).read_text():
            await asyncio.sleep(0.02)


async def run_elastic(end, archive, members, joining=(), generation=1):
    """A generation of an elastic job, which these members (none: it goes on elsewhere) and newcomers belong to."""
    spec = common_pb2.JobSpec(
        entry="train.py", nnodes=1, nproc_per_node=1, elastic=True, code=archive, env={"KEEP": "1"}
    )
    there = node_pb2.HostPlan(node_id="elsewhere", address="127.0.0.1", ranks=[0], members=[90])
    here = node_pb2.HostPlan(node_id="n", address="127.0.0.1", ranks=range(len(members)), members=members)
    parts = [node_pb2.HostPlan(node_id="n", ranks=range(len(joining)), members=joining)] if joining else []
    await end.send(
        run=node_pb2.RunJob(
            job_id="job",
            generation=generation,
            spec=spec,
            host_index=0 if members else NO_HOST,
            hosts=[here if members else there],
            joining=parts,
            job_key=bytes(32),
            master_addr="127.0.0.1",
            master_port=12345,
        )
    )


async def test_a_daemon_that_was_killed_finds_the_code_again(end, daemon, project):
    """Ranks go on in their copy, newcomers start in it, and it goes with the job. Nothing is fetched again."""
    (project / "train.py").write_text("import lib.words\n" + PROGRAM)
    archive = archive_in(end, project)
    await run_elastic(end, archive, [0])
    job = await end.job_until("job", lambda job: job.ranks and job.ranks[0].state == common_pb2.RANK_STATE_RUNNING)
    await until_printed(job.ranks[0], "generation 1 rank 0 of 1")
    folder = Path(f"/proc/{job.ranks[0].pid}/cwd").resolve()
    known, asked = len(end.hellos), len(end.code_questions)
    daemon.proper().kill()
    await end.until(lambda: len(end.hellos) > known)
    assert end.hellos[-1].jobs[0].suspended
    await run_elastic(end, archive, [0], generation=2)
    await end.job_until("job", lambda job: job.entered == 2 or job.error)
    await run_elastic(end, archive, [0], joining=[1], generation=2)
    job = await end.job_until("job", lambda job: (len(job.ranks) == 2 and job.ranks[1].pid) or job.error)
    assert not job.error and Path(f"/proc/{job.ranks[1].pid}/cwd").resolve() == folder
    assert (folder / "lib" / "words.py").exists() and len(end.code_questions) == asked
    await end.stop_job("job", grace_s=0.5, generation=2)
    await end.stopped("job")
    assert not folder.exists()
    # The restarted daemon takes the archive from its cache, too.
    await end.run_script("later", "words.py", code=archive, workdir="lib")
    assert [rank.exit_code for rank in (await end.exited("later")).ranks] == [0] and len(end.code_questions) == asked


async def test_a_next_generation_of_a_job_that_is_stopped_while_its_code_comes(end, daemon, project):
    """The end of the first one's preparation must not remove the code of the second one, and kill its ranks. A second
    one that is stopped before it has begun is told as stopped."""
    archive = archive_in(end, project)
    end.answers_code = asyncio.Event()
    for name in ("job", "stopped"):
        await end.run_script(name, "train.py", code=archive, env={"KEEP": "1"})
        await end.job_until(name, lambda job: job.phase == node_pb2.LOCAL_PHASE_PREPARING)
        await end.stop_job(name)
        await end.stopped(name)
        await end.run_script(name, "train.py", code=archive, env={"KEEP": "1"}, generation=2)
    await end.stop_job("stopped", generation=2)
    await end.run_script("later", "words.py", code=archive, workdir="lib")  # what came before it has arrived
    await end.job_until("later", lambda job: job.phase == node_pb2.LOCAL_PHASE_PREPARING)
    end.answers_code.set()
    job = await end.job_until("job", lambda job: job.generation == 2 and job.ranks[0].pid)
    await until_printed(job.ranks[0], "shipped")
    folder = Path(f"/proc/{job.ranks[0].pid}/cwd").resolve()
    await end.exited("later")
    await end.job_until("stopped", lambda job: job.generation == 2 and job.phase == node_pb2.LOCAL_PHASE_STOPPED)
    (folder / "end").touch()
    job = await end.exited("job")
    assert [(rank.exit_code, rank.signal) for rank in job.ranks] == [(0, 0)], job.ranks[0].error_tail
    await end.stop_job("job", generation=2)
    await end.stopped("job")


async def test_newcomers_of_a_job_that_was_stopped_while_its_code_came(end, daemon, project):
    """The node has nothing of generation 2, and says so while it still prepares generation 1. Newcomers of generation 3
    begin when that is over: its end would remove their code, and kill them."""
    archive = archive_in(end, project)
    end.answers_code = asyncio.Event()
    await run_elastic(end, archive, [0])
    await end.job_until("job", lambda job: job.phase == node_pb2.LOCAL_PHASE_PREPARING)
    await end.stop_job("job")
    await end.stopped("job")
    await run_elastic(end, archive, [], generation=2)
    await end.job_until("job", lambda job: job.generation == 2 and job.phase == node_pb2.LOCAL_PHASE_STOPPED)
    await run_elastic(end, archive, [], joining=[5], generation=3)
    await end.run_script("later", "words.py", code=archive, workdir="lib")  # what came before it has arrived
    await end.job_until("later", lambda job: job.phase == node_pb2.LOCAL_PHASE_PREPARING)
    end.answers_code.set()
    job = await end.job_until("job", lambda job: job.generation == 3 and job.ranks and job.ranks[0].pid)
    await until_printed(job.ranks[0], "shipped")
    folder = Path(f"/proc/{job.ranks[0].pid}/cwd").resolve()
    await end.exited("later")
    (folder / "end").touch()
    job = await end.exited("job")
    assert [(rank.member, rank.exit_code, rank.signal) for rank in job.ranks] == [(5, 0, 0)], job.ranks[0].error_tail
    await end.stop_job("job", generation=3)
    await end.stopped("job")


@pytest.fixture
def rm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what `rm` does in daemons that are started later."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(text: str) -> None:
        (folder / "rm").write_text(f"#!/bin/sh\n{text}\n")
        (folder / "rm").chmod(0o755)

    return put


async def test_a_tree_that_takes_long_keeps_no_daemon_away(end, start_daemon, project, rm, tmp_path):
    """Ranks of others wait for a daemon that was killed, and their lease ends."""
    rm(f'until [ -e {tmp_path}/go ]; do sleep 0.1; done; exec /bin/rm "$@"')
    daemon = await start_daemon()
    await end.run_script("job", "train.py", code=archive_in(end, project))
    folder = Path(Path((await end.exited("job")).ranks[0].log_path).read_text().split()[1])
    daemon.proper().kill()
    await end.until(lambda: len(end.hellos) == 2)
    left = list(folder.parent.glob(".gone-*"))
    assert not folder.exists() and left
    (tmp_path / "go").touch()
    async with asyncio.timeout(SOON_S):
        while any(path.exists() for path in left):
            await asyncio.sleep(0.02)


async def test_nobody_begins_in_a_tree_that_was_removed_in_part(end, start_daemon, project, rm):
    rm('/bin/rm -r "$3/lib"; exit 1')
    await start_daemon()
    archive = archive_in(end, project)
    await run_elastic(end, archive, [0])
    await end.job_until("job", lambda job: job.ranks and job.ranks[0].pid)
    await end.stop_job("job", grace_s=0.5)
    await end.stopped("job")
    await run_elastic(end, archive, [], joining=[1], generation=2)
    job = await end.job_until("job", lambda job: any(rank.member == 1 and rank.pid for rank in job.ranks))
    await until_printed(next(rank for rank in job.ranks if rank.member == 1), "shipped")
    await end.stop_job("job", grace_s=0.5, generation=2)
    await end.stopped("job")
