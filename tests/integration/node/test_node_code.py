"""Code that is shipped, on the node: fetched once, checked, a copy for each job, gone after it."""

import asyncio
import hashlib
import os
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.node_daemon import until_printed
from rig.ranks.elastic import PROGRAM

from bagua.base.code_archive import PIECE_BYTES
from bagua.client import pack
from bagua.proto import common_pb2, node_pb2

SCRIPT = """
import os, pathlib, time
from lib.words import word
print(word, flush=True)
print(os.getcwd(), flush=True)
pathlib.Path("made-" + os.environ["RANK"]).touch()
while not pathlib.Path("end").exists() and "KEEP" in os.environ:
    time.sleep(0.02)
"""
KEEP = {"env": {"KEEP": "1"}}


@pytest.fixture
def project(tmp_path):
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "words.py").write_text("word = 'shipped'\n")
    (folder / "train.py").write_text(SCRIPT)
    own = str(tmp_path).encode()  # no other test has the same code
    (folder / "large.bin").write_bytes(hashlib.shake_128(own).digest(PIECE_BYTES + 5))  # two pieces
    return folder


def archive_in(end, folder):
    packed = pack(folder)
    end.code = b"".join(packed.parts(1 << 20))
    return packed.archive


def folder_of(rank):
    return Path(Path(rank.log_path).read_text().splitlines()[1])


async def run_elastic(end, archive, members, generation=1, joining=()):
    """A generation of an elastic job in shipped code."""
    await end.run_members(members, generation, joining, entry="train.py", nproc_per_node=1, code=archive, **KEEP)


async def test_ranks_run_in_a_copy(end, daemon, project):
    archive = archive_in(end, project)
    await end.run_script("one", "train.py", nproc=2, code=archive)
    job = await end.exited("one")
    assert [rank.exit_code for rank in job.ranks] == [0, 0], job.ranks[0].error_tail
    await until_printed(job.ranks, "shipped")
    folder = folder_of(job.ranks[0])
    assert folder.is_relative_to(daemon.state) and (folder / "made-1").exists()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert end.code_questions == [("one", 0), ("one", 1)]
    await end.end_job("one")
    assert not folder.exists() and Path(job.ranks[0].log_path).exists()
    # Another job in the same code: nothing is fetched. Its working directory lies below the root.
    await end.run_script("two", "words.py", code=archive, workdir="lib")
    job = await end.exited("two")
    assert [rank.exit_code for rank in job.ranks] == [0] and len(end.code_questions) == 2


async def test_code_that_is_not_that_of_the_job(end, daemon, project):
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
    assert not list(daemon.state.rglob("jobs/*/code"))
    for name, code, more, words in (
        ("path", common_pb2.CodeArchive(digest="../x", bytes=3), {}, "no SHA-256"),
        ("out", archive, {"workdir": "../.."}, "leads out"),
    ):
        await end.run_script(name, "train.py", code=code, **more)
        assert words in (await end.stopped(name)).error


async def test_a_daemon_that_was_killed_finds_the_code_again(end, start_daemon, project):
    """Ranks go on in their copy, newcomers start in it, and it goes with the job. Nothing is fetched again."""
    daemon = await start_daemon()
    (project / "train.py").write_text("import lib.words\n" + PROGRAM)
    archive = archive_in(end, project)
    await run_elastic(end, archive, [0])
    job = await end.runs()
    await until_printed(job.ranks, "generation 1 rank 0 of 1 sum 0")
    folder = Path(f"/proc/{job.ranks[0].pid}/cwd").resolve()
    known, asked = len(end.hellos), len(end.code_questions)
    daemon.proper().kill()
    await end.until(lambda: len(end.hellos) > known)
    assert end.hellos[-1].jobs[0].suspended
    await run_elastic(end, archive, [0], 2)
    await end.job_until("job", lambda job: job.entered == 2 or job.error)
    await run_elastic(end, archive, [0], 2, joining=[1])
    job = await end.job_until("job", lambda job: (len(job.ranks) == 2 and job.ranks[1].pid) or job.error)
    assert not job.error and Path(f"/proc/{job.ranks[1].pid}/cwd").resolve() == folder
    assert (folder / "lib" / "words.py").exists() and len(end.code_questions) == asked
    await end.end_job(grace_s=0.5, generation=2)
    assert not folder.exists()
    # The restarted daemon takes the archive from its cache, too.
    await end.run_script("later", "words.py", code=archive, workdir="lib")
    assert [rank.exit_code for rank in (await end.exited("later")).ranks] == [0] and len(end.code_questions) == asked


async def test_a_next_generation_of_a_job_that_is_stopped_while_its_code_comes(end, daemon, project):
    """The end of the first one's preparation must not remove the code of the second one, and kill its ranks. A second
    one that is stopped before it has begun is told so. ``unit/node/test_node_next_generation.py`` has all orders."""
    archive = archive_in(end, project)
    end.answers_code = asyncio.Event()
    for name in ("job", "stopped"):
        await end.run_script(name, "train.py", code=archive, **KEEP)
        await end.job_until(name, lambda job: job.phase == node_pb2.LOCAL_PHASE_PREPARING)
        await end.end_job(name)
        await end.run_script(name, "train.py", code=archive, generation=2, **KEEP)
    await end.stop_job("stopped", generation=2)
    await end.run_script("later", "words.py", code=archive, workdir="lib")  # what came before it has arrived
    await end.job_until("later", lambda job: job.phase == node_pb2.LOCAL_PHASE_PREPARING)
    end.answers_code.set()
    job = await end.job_until("job", lambda job: job.generation == 2 and job.ranks[0].pid)
    await until_printed(job.ranks, "shipped")
    folder = Path(f"/proc/{job.ranks[0].pid}/cwd").resolve()
    await end.exited("later")
    await end.job_until("stopped", lambda job: job.generation == 2 and job.phase == node_pb2.LOCAL_PHASE_STOPPED)
    (folder / "end").touch()
    job = await end.exited("job")
    assert [(rank.exit_code, rank.signal) for rank in job.ranks] == [(0, 0)], job.ranks[0].error_tail


@pytest.fixture
def rm(tmp_path, monkeypatch):
    """Sets what `rm` does in daemons that are started later."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(text):
        (folder / "rm").write_text(f"#!/bin/sh\n{text}\n")
        (folder / "rm").chmod(0o755)

    return put


async def test_a_tree_that_takes_long_keeps_no_daemon_away(end, start_daemon, project, rm, tmp_path):
    """Ranks of others wait for a daemon that was killed, and their lease ends. Nobody begins in a tree that was removed
    in part."""
    rm(f'until [ -e {tmp_path}/go ]; do sleep 0.1; done; exec /bin/rm "$@"')
    daemon = await start_daemon()
    archive = archive_in(end, project)
    await end.run_script("first", "train.py", code=archive)
    folder = folder_of((await end.exited("first")).ranks[0])
    daemon.proper().kill()
    await end.until(lambda: len(end.hellos) == 2)
    left = list(folder.parent.glob(".gone-*"))
    assert not folder.exists() and left
    (tmp_path / "go").touch()
    async with asyncio.timeout(SOON_S):
        while any(path.exists() for path in left):
            await asyncio.sleep(0.02)

    rm('/bin/rm -r "$3/lib"; exit 1')
    await run_elastic(end, archive, [0])
    await end.job_until("job", lambda job: job.ranks and job.ranks[0].pid)
    await end.end_job(grace_s=0.5)
    await run_elastic(end, archive, [], 2, joining=[1])
    job = await end.job_until("job", lambda job: any(rank.member == 1 and rank.pid for rank in job.ranks))
    await until_printed([rank for rank in job.ranks if rank.member == 1], "shipped")
    await end.end_job(grace_s=0.5, generation=2)
