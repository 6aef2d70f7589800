"""A daemon whose disk is full: its ranks go on, their ends are told, and the journal is mended once there is room.

The limit of file sizes stands for the disk: it needs no root, and can be lifted while the daemon runs.
"""

import asyncio
import json
import resource


def limit_files(pid, size=resource.RLIM_INFINITY):
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


WAITER = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("x" * 100_000)
"""


async def until_written(path, **expected):
    """The journal is nobody's to wait for: looked at again and again."""
    async with asyncio.timeout(60):
        while True:
            rank = json.loads(path.read_text())["job"]["ranks"][0]
            if rank | expected == rank:
                return
            await asyncio.sleep(0.05)


async def test_a_full_disk_ends_no_job_and_the_journal_follows(end, start_daemon, script, tmp_path, state):
    """Then a daemon is started on a full disk."""
    daemon = await start_daemon()
    journal = state / "node-n" / "journal"
    for name in ("job", "left"):
        await end.run_script(name, script(WAITER), args=[str(tmp_path / f"go-{name}")])
        job = await end.job_until(name, lambda job: job.ranks and job.ranks[0].pid)
        await until_written(journal / f"{name}.json", pid=job.ranks[0].pid, state="RANK_STATE_RUNNING")

    limit_files(daemon.proper().pid, 0)
    (tmp_path / "go-job").touch()
    job = await end.exited("job")
    assert job.ranks[0].exit_code == 0 and not job.error
    await end.end_job()
    assert "RANK_STATE_EXITED" not in (journal / "job.json").read_text(), "there was no room"

    limit_files(daemon.proper().pid)
    await until_written(journal / "job.json", state="RANK_STATE_EXITED")
    assert "LOCAL_PHASE_STOPPED" in (journal / "job.json").read_text()
    assert daemon.process.poll() is None

    daemon.kill()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # inherited
    try:
        again = await start_daemon()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    job = await end.stopped("left")
    assert again.ready and "was restarted" in job.error
    assert again.process.poll() is None
