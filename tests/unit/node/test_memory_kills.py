"""Whose memory the kernel has taken: counters of cgroups, of both versions, and a real one."""

import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from bagua.base.memory_kills import KILLER, MemoryWatch

V1, V2 = ("4:memory:/a/b\n0::/a/b\n", "memory", "memory.oom_control"), ("0::/a/b\n", "", "memory.events")
LIMITS = {"memory.oom_control": ("memory.limit_in_bytes", "memory.max_usage_in_bytes")}
LIMITS["memory.events"] = ("memory.max", "memory.peak")


@pytest.mark.parametrize("nested", [True, False], ids=["host", "container"])
@pytest.mark.parametrize(("cgroup", "controller", "counter"), [V1, V2], ids=["v1", "v2"])
def test_what_the_counter_says(tmp_path, cgroup, controller, counter, nested):
    proc, root = tmp_path / "proc", tmp_path / "sys"
    folder = root / controller / ("a/b" if nested else "")
    for made in (proc / "7", folder):
        made.mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("9:name=systemd:/\n" + cgroup)
    (folder / counter).write_text("low 0\noom_kill_disable 0\noom_kill 2\n")
    watch = MemoryWatch(7, proc, root)
    assert "counts none." in watch.explain()
    limit, peak = LIMITS[counter]
    (folder / limit).write_text(f"{1 << 30}\n")
    (folder / peak).write_text(f"{1 << 29}\n")
    assert "counts none (limit 1.00 GiB, of which 0.50 GiB were used). Or another process sent" in watch.explain()
    (folder / counter).write_text("oom_kill 3\n")
    assert watch.explain().startswith(f"{KILLER} ended a process of its cgroup meanwhile (limit 1.00 GiB")
    (folder / limit).write_text("max\n")
    assert "meanwhile. Give it more memory" in watch.explain()


def test_the_group_of_a_job_has_no_counter_of_its_own(tmp_path):
    proc, root = tmp_path / "proc", tmp_path / "sys"
    for made in (proc / "7", root / "node" / "job"):
        made.mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("0::/node/job\n")
    (root / "node" / "memory.events").write_text("oom_kill 2\n")
    watch = MemoryWatch(7, proc, root)
    (root / "node" / "memory.events").write_text("oom_kill 3\n")
    assert watch.killed


@pytest.fixture
def small_cgroup():
    """A cgroup that may use 64 MiB."""
    v1 = Path("/sys/fs/cgroup/memory")
    folder = (v1 if v1.is_dir() else Path("/sys/fs/cgroup")) / f"bagua-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.mark.root
def test_a_process_that_takes_too_much(small_cgroup):
    program = "input(); taken = bytearray(256 << 20)"
    with subprocess.Popen([sys.executable, "-I", "-c", program], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        (small_cgroup / "cgroup.procs").write_text(str(process.pid))
        watch = MemoryWatch(process.pid)
        process.communicate(b"go\n", timeout=60)
    if process.returncode == 0:
        pytest.skip("swap took what was too much")
    assert process.returncode == -9
    assert watch.explain().startswith(f"{KILLER} ended a process of its cgroup meanwhile (limit 0.06 GiB, of which 0.0")
