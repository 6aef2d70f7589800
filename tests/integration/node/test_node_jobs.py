"""A job on one node: start, exit, failure, stop."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from rig.limits import SOON_S
from rig.node_daemon import alive, plan, printed, until_gone, until_printed

from bagua.base.control_group import own_group
from bagua.daemon.node.processes.groups import JobGroups
from bagua.daemon.node.processes.proc import read_status
from bagua.proto import common_pb2, node_pb2

STARTED = node_pb2.LOCAL_PHASE_STARTED
RUNNING = common_pb2.RANK_STATE_RUNNING
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


async def started(end, job_id):
    job = await end.runs(job_id)
    assert job.phase == STARTED
    return [rank.pid for rank in job.ranks]


async def test_environment_folder_and_output(end, daemon, script, tmp_path):
    path = script("import os, json, sys\nprint(json.dumps(dict(os.environ, cwd=os.getcwd(), argv=sys.argv)))\n")
    await end.run_script("job", path, nproc=2, args=["--x", "1"], env={"MINE": "yes", "RANK": "99"})
    job = await end.exited("job")
    assert [(rank.exit_code, rank.signal, rank.error_tail) for rank in job.ranks] == [(0, 0, "")] * 2
    assert job.phase == STARTED, "the engine stays until the coordinator says stop"
    env = json.loads(Path(job.ranks[1].log_path).read_text())
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    expected |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}
    expected |= {"MINE": "yes", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "cwd": str(tmp_path)}
    expected |= {"BAGUA_DAEMON_SOCKET": daemon.ready["socket"], "BAGUA_JOB_ID": f"{end.prefix}job"}
    assert {key: env[key] for key in expected} == expected
    assert env["argv"] == [str(path), "--x", "1"]
    assert (await end.end_job()).error == ""


async def test_programs_and_modules(end, daemon, script):
    script("print('module')", "a_module.py")
    folder = str(script("", "x").parent)
    await end.run_script("module", "a_module", is_module=True, workdir=folder)
    await end.run_script("program", "sh", no_python=True, args=["-c", "echo program"], workdir=folder)
    for job_id in ("module", "program"):
        assert printed((await end.exited(job_id)).ranks[0]) == [job_id]


async def test_a_rank_that_raises(end, daemon, script):
    path = script("import os, time\nif os.environ['RANK'] == '1': raise ValueError('no digits')\ntime.sleep(600)\n")
    await end.run_script("job", path, nproc=2)
    exited = common_pb2.RANK_STATE_EXITED
    job = await end.job_until("job", lambda job: job.ranks and job.ranks[1].state == exited)
    assert job.ranks[0].state == RUNNING and job.error == ""
    assert (job.ranks[1].exit_code, job.ranks[1].signal) == (1, 0)
    assert job.ranks[1].error_tail.startswith("Traceback (most recent call last)")
    assert job.ranks[1].error_tail.endswith("ValueError: no digits")
    assert (await end.end_job()).ranks[0].signal == signal.SIGTERM


async def test_a_killed_rank_ends_the_others_without_a_coordinator(end, daemon, script):
    await end.run_script("job", script(SLEEP), nproc=2)
    pids = await started(end, "job")
    await end.stop()
    os.kill(pids[1], signal.SIGKILL)
    begin = time.monotonic()
    await until_gone(pids)
    assert time.monotonic() - begin > 3, "the coordinator has a while to say it"
    await end.start()
    job = await end.stopped("job")
    assert [rank.signal for rank in job.ranks] == [signal.SIGTERM, signal.SIGKILL]


async def test_stop_with_grace_then_kill(end, daemon, script):
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, lambda *a: print('no', flush=True))\n" + SLEEP
    await end.run_script("job", script(stubborn.replace("time.sleep(600)", "[time.sleep(1) for _ in range(600)]")))
    await until_printed((await end.runs()).ranks, "up")
    job = await end.end_job(grace_s=0.5)
    assert job.ranks[0].signal == signal.SIGKILL
    assert "no" in Path(job.ranks[0].log_path).read_text(), "it was asked first"


# Of the daemon and its keeper: nothing may be written there.
NO_GROUPS = """
import os
access = os.access
os.access = lambda path, mode, **more: not str(path).endswith('cgroup.procs') and access(path, mode, **more)
"""
ESCAPE = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve('/bin/sh', ['sh', '-c', 'echo $$; exec sleep 600'], {})
    os._exit(0)
os.wait()
"""
ENDS = ("fail", "cancel", "adopted", "daemon killed", "keeper killed", "terminated")


@pytest.mark.parametrize("groups", [True, False], ids=["in a control group", "without one"])
async def test_processes_that_leave_everything_end_with_their_job(
    end, start_daemon, state, script, groups, monkeypatch, tmp_path
):
    """With a session of its own, the keeper for a parent, and no environment. Other jobs' processes live on."""
    if groups and ((own := own_group()) is None or not os.access(own / "cgroup.procs", os.W_OK)):
        pytest.skip("cgroup version 2 is not mounted here, or may not be written to")
    if not groups:
        (tmp_path / "sitecustomize.py").write_text(NO_GROUPS)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = await start_daemon()
    for how in ENDS:
        job, older = f"{how.replace(' ', '-')}-job", f"{how.replace(' ', '-')}-older"
        escaped, known, boot = {}, len(end.hellos), end.hellos[-1].boot_id
        ends_all = how.endswith(("killed", "terminated"))
        names = (job,) if ends_all else (job, older)
        for name in reversed(names):
            last = "sys.exit(3)" if (how, name) == ("fail", job) else "time.sleep(600)"
            await end.run_script(name, script(ESCAPE + last, f"{name}.py"), elastic=how == "adopted")
            rank = (await end.job_until(name, lambda job: job.ranks and job.ranks[0].log_path)).ranks[0]
            while not Path(rank.log_path).exists() or not (lines := printed(rank)):
                await asyncio.sleep(0.02)
            escaped[name] = int(lines[0])
            while read_status(escaped[name]).parent != daemon.pid:
                await asyncio.sleep(0.01)
        if how == "terminated":
            daemon.process.terminate()
            assert await daemon.wait(SOON_S) == 0
        elif how == "keeper killed":
            daemon.kill()
            assert alive(escaped[job]), "nobody is there to kill it yet"
            daemon = await start_daemon()
            assert end.hellos[-1].boot_id != boot
        elif how in ("daemon killed", "adopted"):
            daemon.proper().kill()
            await end.until(lambda known=known: len(end.hellos) > known)
        elif how == "fail":
            await end.exited(job)
        assert ends_all or alive(escaped[job])
        for name in names:
            if how != "terminated":
                await end.stop_job(name)
            await end.stopped(name)
            assert not alive(escaped[name]), how
            assert name == older or ends_all or alive(escaped[older]), "another job's"
        assert not JobGroups(state, own_group()).jobs(), how


async def test_the_last_reports_arrive_before_the_daemon_ends(end, start_daemon, script):
    """Also at a coordinator that is slow to read: the daemon leaves when it has ended the stream."""
    daemon = await start_daemon()
    jobs = [f"job{number}" for number in range(4)]
    for job in jobs:
        await end.run_script(job, "/bin/true", no_python=True)
        await end.exited(job)
    end.read_pause_s = 0.15
    daemon.process.terminate()
    assert await daemon.wait(SOON_S) == 0
    assert [end.jobs[job].phase for job in jobs] == [node_pb2.LOCAL_PHASE_STOPPED] * 4


async def test_what_can_not_be_started(end, daemon, tmp_path):
    (tmp_path / "plain.txt").write_text("")
    (tmp_path / "broken").write_bytes(b"\x7fELFnonsense")
    (tmp_path / "broken").chmod(0o755)
    for number, (spec, words) in enumerate(
        (
            ({"script": "/nowhere/train.py"}, "the working directory /nowhere does not exist"),
            ({"script": "nothing.py"}, "nothing.py does not exist"),
            ({"script": "nothing.py", "workdir": "/nowhere"}, "the working directory /nowhere does not exist"),
            ({"script": "a_program", "no_python": True}, "the program a_program is not in PATH"),
            ({"script": "./plain.txt", "no_python": True}, "plain.txt is not executable"),
            ({"script": "plain.txt", "python": "/no/python"}, "the program /no/python does not exist"),
            ({"script": "./broken", "no_python": True}, "can't be started"),
        )
    ):
        job_id, here = f"job-{number}", {} if spec["script"].startswith("/") else {"workdir": str(tmp_path)}
        await end.run_script(job_id, nproc=2, **(here | spec))
        job = await end.job_until(job_id, lambda job: job.error)
        assert words in job.error and "node n" in job.error


async def test_repeated_stale_and_newer_directives(end, daemon, script):
    path = script(SLEEP)
    assert (await end.end_job("unknown")).generation == 1
    await end.run_script("job", path, generation=3)
    pids = await started(end, "job")
    await end.run_script("job", path, generation=3)
    await end.run_script("job", path, generation=2)
    await end.stop_job("job", generation=2)
    await end.run_script("after", path)
    await started(end, "after")
    assert [rank.pid for rank in end.jobs["job"].ranks] == pids and end.jobs["job"].phase == STARTED
    await end.run_script("job", path, generation=4)
    job = await end.job_until("job", lambda job: job.generation == 4 and job.ranks[0].state == RUNNING)
    assert job.ranks[0].pid != pids[0] and not alive(pids[0]), "a newer generation takes over"
    await end.end_job("job", generation=4)
    await end.run_script("job", path, generation=4)
    await end.run_script("again", path)
    await started(end, "again")
    assert end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STOPPED, "an ended generation does not begin again"


async def test_directives_that_make_no_sense(end, daemon):
    good = {"job_id": "job", "generation": 1, "spec": common_pb2.JobSpec(entry="x.py"), "job_key": bytes(32)}
    good["hosts"] = [plan([0])]
    for number, (change, words) in enumerate(
        (
            ({"job_key": b"short"}, "job key"),
            ({"host_index": 7}, "host index"),
            ({"hosts": [plan([1])]}, "without gaps"),
        )
    ):
        job_id = f"job-{number}"
        await end.send(run=node_pb2.RunJob(**(good | {"job_id": job_id} | change)))
        assert words in (await end.stopped(job_id)).error
    await end.send(run=node_pb2.RunJob(**(good | {"job_id": "../../etc"})))
    await end.stop_job("../..")
    beats = end.heartbeats
    await end.until(lambda: end.heartbeats > beats + 1)
    assert daemon.process.poll() is None


async def test_a_job_does_not_notice_that_the_coordinator_is_away(end, daemon, script):
    await end.run_script("job", script("import time; time.sleep(1.5)\n"))
    pids = await started(end, "job")
    before = end.hellos[-1]
    await end.stop()
    await until_gone(pids)
    await end.start()
    await end.until(lambda: end.hellos[-1] != before)
    hello = end.hellos[-1]
    assert hello.boot_id == before.boot_id and hello.node_id == "n"
    (job,) = hello.jobs
    assert job.ranks[0].state == common_pb2.RANK_STATE_EXITED and job.ranks[0].exit_code == 0 and job.error == ""
