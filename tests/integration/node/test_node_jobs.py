"""A job on one node: start, exit, failure, stop."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from rig.limits import SOON_S

from bagua.base.control_group import own_group
from bagua.daemon.node.processes.groups import JobGroups
from bagua.daemon.node.processes.proc import read_status
from bagua.proto import common_pb2, node_pb2

STARTED = node_pb2.LOCAL_PHASE_STARTED
RUNNING = common_pb2.RANK_STATE_RUNNING
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"


async def started(end, job_id, nproc=1):
    job = await end.job_until(job_id, lambda job: [rank.state for rank in job.ranks] == [RUNNING] * nproc)
    assert job.phase == STARTED
    return [rank.pid for rank in job.ranks]


async def printed(end, job_id, text, rank=0, request_id=77):
    """Waits until the rank has printed ``text``."""
    read = node_pb2.ReadLog(request_id=request_id, job_id=job_id, rank=rank, follow=True)
    await end.send(read_log=read)
    await end.until(lambda: text in end.logs.get(request_id, b""))
    await end.send(end_log=node_pb2.EndLog(request_id=request_id))


async def test_environment_folder_and_output(end, daemon, script, tmp_path):
    path = script("import os, json, sys\nprint(json.dumps(dict(os.environ, cwd=os.getcwd(), argv=sys.argv)))\n")
    await end.run_script("job", path, nproc=2, args=["--x", "1"], env={"MINE": "yes", "RANK": "99"})
    job = await end.exited("job")
    assert [(rank.exit_code, rank.signal, rank.error_tail) for rank in job.ranks] == [(0, 0, "")] * 2
    assert job.phase == STARTED, "the engine stays until the coordinator says stop"
    env = json.loads(Path(job.ranks[1].log_path).read_text())
    expected = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    expected |= {"GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345", "BAGUA_JOB_ID": "job"}
    expected |= {"MINE": "yes", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "cwd": str(tmp_path)}
    expected |= {"BAGUA_DAEMON_SOCKET": daemon.ready["socket"]}
    assert {key: env[key] for key in expected} == expected
    assert env["argv"] == [str(path), "--x", "1"]
    await end.stop_job("job")
    assert (await end.stopped("job")).error == ""


async def test_programs_and_modules(end, daemon, script):
    script("print('module')", "a_module.py")
    folder = str(script("", "x").parent)
    await end.run_script("module", "a_module", is_module=True, workdir=folder)
    await end.run_script("program", "sh", no_python=True, args=["-c", "echo program"], workdir=folder)
    for job_id in ("module", "program"):
        job = await end.exited(job_id)
        assert Path(job.ranks[0].log_path).read_text() == f"{job_id}\n"


async def test_a_rank_that_raises(end, daemon, script):
    path = script("import os, time\nif os.environ['RANK'] == '1': raise ValueError('no digits')\ntime.sleep(600)\n")
    await end.run_script("job", path, nproc=2)
    exited = common_pb2.RANK_STATE_EXITED
    job = await end.job_until("job", lambda job: job.ranks and job.ranks[1].state == exited)
    assert job.ranks[0].state == RUNNING and job.error == ""
    assert (job.ranks[1].exit_code, job.ranks[1].signal) == (1, 0)
    assert job.ranks[1].error_tail.startswith("Traceback (most recent call last)")
    assert job.ranks[1].error_tail.endswith("ValueError: no digits")
    await end.stop_job("job", grace_s=5)
    job = await end.stopped("job")
    assert job.ranks[0].signal == signal.SIGTERM


async def test_a_killed_rank_ends_the_others_without_a_coordinator(end, daemon, script, until_gone):
    await end.run_script("job", script(SLEEP), nproc=2)
    pids = await started(end, "job", 2)
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
    await started(end, "job")
    await printed(end, "job", b"up")
    await end.stop_job("job", grace_s=0.5)
    job = await end.stopped("job", 10)
    assert job.ranks[0].signal == signal.SIGKILL
    assert "no" in Path(job.ranks[0].log_path).read_text(), "it was asked first"


@pytest.mark.parametrize("how", ["sigterm", "sigkill"])
async def test_no_orphans(end, start_daemon, script, alive, until_gone, how):
    """A rank's child, one that has left the rank's session included, does not outlive the job."""
    daemon = await start_daemon()
    text = "import subprocess, time\nchild = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
    text += "print(child.pid, '.', flush=True)\ntime.sleep(600)"
    await end.run_script("job", script(text))
    await printed(end, "job", b".")
    child = int(end.logs[77].split()[0])
    pids = [end.jobs["job"].ranks[0].pid, child]
    assert alive(child)
    if how == "sigkill":
        daemon.kill()
        await until_gone(pids[:1])
        assert alive(child), "nobody is there to kill it yet"
        await start_daemon()
        assert end.hellos[-1].boot_id != end.hellos[0].boot_id
        job = end.jobs["job"]
        assert job.phase == node_pb2.LOCAL_PHASE_STOPPED and "restarted" in job.error
    else:
        daemon.process.terminate()
        assert await daemon.wait(SOON_S) == 0
        assert "was stopped (SIGTERM)" in end.jobs["job"].error
    await end.stopped("job")
    assert not any(alive(pid) for pid in pids)


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
        os.execve('/bin/sh', ['sh', '-c', 'echo $$ .; exec sleep 600'], {})
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize("groups", [True, False], ids=["in a control group", "without one"])
@pytest.mark.parametrize("how", ["fail", "cancel", "daemon killed", "keeper killed", "adopted"])
async def test_processes_that_leave_everything_end_with_their_job(
    end, start_daemon, state, script, alive, how, groups, monkeypatch, tmp_path
):
    """With a session of its own, the keeper for a parent, and no environment. Other jobs' processes live on."""
    if groups and ((own := own_group()) is None or not os.access(own / "cgroup.procs", os.W_OK)):
        pytest.skip("cgroup version 2 is not mounted here, or may not be written to")
    if not groups:
        (tmp_path / "sitecustomize.py").write_text(NO_GROUPS)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    daemon = await start_daemon()
    escaped = {}
    for number, job in enumerate(("older", "job")):
        last = "sys.exit(3)" if (how, job) == ("fail", "job") else "time.sleep(600)"
        await end.run_script(job, script(ESCAPE + last, f"{job}.py"), elastic=how == "adopted")
        await printed(end, job, b".", request_id=number)
        escaped[job] = int(end.logs[number].split()[0])
        while read_status(escaped[job]).parent != daemon.pid:
            await asyncio.sleep(0.01)
    if how == "keeper killed":
        daemon.kill()
        await start_daemon()
    elif how in ("daemon killed", "adopted"):
        known = len(end.hellos)
        daemon.proper().kill()
        await end.until(lambda: len(end.hellos) > known)
    elif how != "cancel":
        await end.exited("job")
    assert how.endswith("killed") or alive(escaped["job"])
    await end.stop_job("job")
    await end.stopped("job")
    assert not alive(escaped["job"])
    assert how.endswith("killed") or alive(escaped["older"]), "another job's"
    await end.stop_job("older")
    await end.stopped("older")
    assert not alive(escaped["older"])
    assert not JobGroups(state, own_group()).jobs()


async def test_the_last_reports_arrive_before_the_daemon_ends(end, start_daemon, script):
    """Also at a coordinator that is slow to read: the daemon leaves when it has ended the stream."""
    daemon = await start_daemon()
    jobs = [f"job{number}" for number in range(4)]
    for job in jobs:
        await end.run_script(job, script("print(1)"))
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
        await end.stop_job(job_id)
        await end.stopped(job_id)


async def test_repeated_and_stale_directives(end, daemon, script):
    path = script(SLEEP)
    await end.stop_job("unknown")
    assert (await end.stopped("unknown")).generation == 1
    await end.run_script("job", path, generation=3)
    pids = await started(end, "job")
    await end.run_script("job", path, generation=3)
    await end.run_script("job", path, generation=2)
    await end.stop_job("job", generation=2)
    await end.run_script("after", path)
    await started(end, "after")
    assert [rank.pid for rank in end.jobs["job"].ranks] == pids and end.jobs["job"].phase == STARTED
    await end.stop_job("job", generation=3)
    await end.stopped("job")
    await end.run_script("job", path, generation=3)
    await end.run_script("again", path)
    await started(end, "again")
    assert end.jobs["job"].phase == node_pb2.LOCAL_PHASE_STOPPED, "an ended generation does not begin again"
    for job_id in ("after", "again"):
        await end.stop_job(job_id)
        await end.stopped(job_id)


async def test_a_newer_generation_takes_over(end, daemon, script, alive):
    path = script(SLEEP)
    await end.run_script("job", path, generation=1)
    (old,) = await started(end, "job")
    await end.run_script("job", path, generation=2)
    job = await end.job_until("job", lambda job: job.generation == 2 and job.ranks[0].state == RUNNING)
    assert job.ranks[0].pid != old and not alive(old)


async def test_directives_that_make_no_sense(end, daemon):
    good = {
        "job_id": "job",
        "generation": 1,
        "spec": common_pb2.JobSpec(entry="x.py"),
        "hosts": [node_pb2.HostPlan(node_id="n", ranks=[0])],
        "job_key": bytes(32),
    }
    for number, (change, words) in enumerate(
        (
            ({"job_key": b"short"}, "job key"),
            ({"host_index": 7}, "host index"),
            ({"hosts": [node_pb2.HostPlan(node_id="n", ranks=[1])]}, "without gaps"),
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


async def test_a_job_does_not_notice_that_the_coordinator_is_away(end, daemon, script, until_gone):
    await end.run_script("job", script("import time; time.sleep(1.5)\n"))
    pids = await started(end, "job")
    await end.stop()
    await until_gone(pids)
    await end.start()
    await end.until(lambda: len(end.hellos) == 2)
    hello = end.hellos[1]
    assert hello.boot_id == end.hellos[0].boot_id and hello.node_id == "n"
    (job,) = hello.jobs
    assert job.ranks[0].state == common_pb2.RANK_STATE_EXITED and job.ranks[0].exit_code == 0 and job.error == ""
