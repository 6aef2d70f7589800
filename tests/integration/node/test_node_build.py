"""A node whose core is still being built: a job or the daemon can be stopped without waiting for the compiler."""

import asyncio
import os
import time

import psutil
import pytest
from rig.limits import SOON_S

from bagua.proto import node_pb2


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch):
    """A compiler that says that it has begun, and never ends. Returns the pipe in which it says so."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    compiler = tmp_path / "slow-c++"
    compiler.write_text(f"#!/bin/sh\necho $$ > {begun}\nexec sleep 600\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("BAGUA_CACHE_DIR", str(tmp_path / "cache"))
    return begun


async def test_ends_that_do_not_wait_for_the_compiler(end, slow_compiler, start_daemon, script):
    daemon = await start_daemon()
    for job_id in ("first", "second"):
        await end.run_script(job_id, script(""))
        job = await end.job_until(job_id, lambda job: job.waiting)
        assert job.phase == node_pb2.LOCAL_PHASE_PREPARING
        assert job.waiting.startswith("node n compiles the native core") and "0 of " in job.waiting
    pid = int(await asyncio.to_thread(slow_compiler.read_text))
    below = psutil.Process(daemon.pid).children(recursive=True)
    assert pid in [process.pid for process in below]
    assert sum("build.py" in " ".join(process.cmdline()) for process in below) == 1, "two jobs, one build"
    begin = time.monotonic()
    await end.end_job("first")
    assert time.monotonic() - begin < SOON_S
    assert end.jobs["second"].phase == node_pb2.LOCAL_PHASE_PREPARING
    daemon.process.terminate()
    assert await daemon.wait(SOON_S) == 0
    assert not any(process.is_running() for process in below)
    assert end.jobs["second"].phase == node_pb2.LOCAL_PHASE_STOPPED


async def test_a_core_that_can_not_be_built(end, slow_compiler, start_daemon, script):
    slow_compiler.with_name("slow-c++").write_text("#!/bin/sh\necho 'no such dialect' >&2\nexit 1\n")
    await start_daemon()
    await end.run_script("job", script(""))
    job = await end.stopped("job")
    assert "node n: Building the native core failed" in job.error and "bagua doctor" in job.error
    assert job.waiting == ""
