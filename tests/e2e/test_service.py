"""A service: coordinator, two daemons, and the command line that controls jobs."""

import hashlib
import json
import signal
import time

from rig import leaks
from rig.limits import SOON_S
from rig.ranks.elastic import JOIN

TRAIN = f"""{JOIN}
import pathlib
from bagua.proto import common_pb2

print("training", flush=True)
step = 0
while not pathlib.Path(sys.argv[1]).exists():
    step += 1
    about = dict(job_id=job, rank=me, step=step, total=1000, metrics=dict(loss=1.0 / step))
    service.ReportProgress(common_pb2.Progress(**about), timeout=60)
    time.sleep(0.05)
print("done", flush=True)
"""

WAIT = """
    import pathlib, sys, time

    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
"""


def test_job_from_submit_to_end(service):
    sandbox = service.sandbox
    stop = sandbox.folder / "stop"
    script = sandbox.script("train.py", TRAIN)
    nodes = service.json("node", "list")["nodes"]
    assert [(node["node_id"], node["slots"], node["connected"]) for node in nodes] == [
        ("node-a", 2, True),
        ("node-b", 2, True),
    ]

    job_id = service.submit("--nnodes", "2", "--name", "first", script, stop)
    job = service.wait_for_state(job_id, ["running"], within=60)
    assert [rank["node_id"] for rank in job["ranks"]] == ["node-a", "node-b"]
    assert [node["used_slots"] for node in service.json("node", "list")["nodes"]] == [1, 1]
    assert job_id in [found["job_id"] for found in service.json("job", "list")["jobs"]]
    assert job_id in service.call("job", "list").out
    sandbox.wait_until(lambda: service.job(job_id)["progress"], 60)
    assert "node-b" in service.call("job", "show", job_id[:6]).out

    follower = sandbox.start(*sandbox.command, "job", "logs", "-f", job_id)
    stop.touch()
    logs = sandbox.finish(follower, time.monotonic(), deadline=60)
    assert logs.code == 0, logs.text
    expected = sorted(f"[rank {rank}] {word}" for rank in range(2) for word in ("training", "done"))
    assert sorted(logs.out.splitlines()) == expected

    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=30)
    assert job["state"] == "succeeded", job
    kinds = [event["kind"] for event in job["events"]]
    assert kinds[0] == "submitted"
    assert all(event["reason"] for event in job["events"])
    assert {rank["exit_code"] for rank in job["ranks"]} == {0}
    # Logs of a job that has ended, of one rank, from the end.
    lines = service.json("job", "logs", job_id, "--rank", "1", "--tail", "1")["lines"]
    assert lines == [{"rank": 1, "text": "done"}]
    assert [node["used_slots"] for node in service.json("node", "list")["nodes"]] == [0, 0]


def test_watching_a_job_that_fails(service):
    sandbox = service.sandbox
    script = sandbox.script(
        "fail.py",
        """
        import os, pathlib, sys, time

        print("here", flush=True)
        pathlib.Path("rank-" + os.environ["RANK"]).touch()
        while not pathlib.Path("rank-0").exists():
            time.sleep(0.02)
        if os.environ["RANK"] == "1":
            sys.exit("no data")
        time.sleep(60)
        """,
    )
    done = service.call("job", "submit", "--watch", "--output", "json", "--nproc-per-node", "2", script)
    assert done.code == 1, done.text
    assert {"[rank 0] here", "[rank 1] here", "[rank 1] no data"} <= set(done.err.splitlines())
    summary = json.loads(done.out)
    assert (summary["state"], summary["exit_code"]) == ("failed", 1)
    assert "rank 1 on node node-a exited with code 1" in summary["reason"]
    assert "no data" in done.err


def test_leaving_a_watch_leaves_the_job_and_cancelling_ends_it(service):
    sandbox = service.sandbox
    script = sandbox.script("wait.py", WAIT)
    process = sandbox.start(*sandbox.command, "job", "submit", "--watch", "--name", "left", script, "never")
    [job_id] = sandbox.wait_until(
        lambda: [job["job_id"] for job in service.json("job", "list")["jobs"] if job["name"] == "left"], 30
    )
    service.wait_for_state(job_id, ["running"], within=60)
    process.send_signal(signal.SIGINT)
    done = sandbox.finish(process, time.monotonic(), deadline=10)
    assert done.code == 130, done.text
    assert "goes on" in done.err
    assert service.state(job_id) == "running"
    assert service.call("job", "cancel", job_id[:8]).code == 0
    job = service.wait_for_state(job_id, ["cancelled"], within=SOON_S)
    assert all(rank["state"] == "exited" for rank in job["ranks"])
    assert service.json("job", "cancel", job_id)["state"] == "cancelled", "again: nothing changes"


def test_what_is_refused_is_told_in_a_line(service):
    done = service.call("job", "show", "nosuch")
    assert (done.code, done.out) == (1, "") and done.err.startswith("error: There is no job 'nosuch'.")
    assert "Traceback" not in done.err


def test_a_secret_reaches_the_ranks_and_no_file(service):
    sandbox = service.sandbox
    file, value = leaks.secret_file(sandbox.folder)
    digest = hashlib.sha256(value.encode()).hexdigest()
    program = f'printf %s "$HF_TOKEN" | sha256sum | grep -q {digest}'
    job_id = service.submit("--no-python", "--secret", f"HF_TOKEN={file}", "sh", "-c", program)
    job = service.wait_for_state(job_id, ["succeeded", "failed"], within=SOON_S)
    assert job["state"] == "succeeded", job
    assert leaks.files_with(value, sandbox.folder, sandbox.state) == [file]
