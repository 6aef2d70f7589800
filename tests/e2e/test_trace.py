"""A job of two nodes that is traced while it runs, and jobs that can't be."""

import json
import subprocess

import pytest
from rig.engines import DEADLINE_S
from rig.timelines import assert_perfetto_takes, events_of

TRAIN = """
    import pathlib, sys, time
    import torch
    import bagua.torch_api as bagua

    torch.set_num_threads(1)
    bagua.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model = model.with_bagua([optimizer])
    stop, stall = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    step = 0
    while True:
        if bagua.get_rank() == 1:
            time.sleep(0.05)
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
        step += 1
        bagua.report(step=step)
        while stall.exists() and bagua.get_rank() == 1:
            time.sleep(0.02)
        flag = torch.tensor([float(stop.exists())])
        bagua.allreduce_inplace(flag, op=bagua.ReduceOp.MAX)
        if flag.item():
            break
"""
BUCKETS = 2
STEPS = 3


@pytest.fixture(scope="module")
def job(service):
    """Trains until the end of the file's tests. Rank 1 computes 50 ms longer."""
    sandbox = service.sandbox
    script = sandbox.script("train.py", TRAIN)
    stop, stall = sandbox.folder / "stop", sandbox.folder / "stall"
    job_id = service.submit("--nnodes", "2", "--env", "BAGUA_DEFAULT_BUCKET_SIZE=60000", script, stop, stall)
    service.wait_for_state(job_id, ["running"], within=DEADLINE_S)
    sandbox.wait_until(lambda: service.ranks_that_report(job_id) == 2, DEADLINE_S)
    yield job_id
    stop.touch()
    service.wait_for_state(job_id, ["succeeded"], within=DEADLINE_S)
    done = service.call("job", "trace", job_id)
    assert done.code != 0 and "has ended (succeeded): only a job that runs can be traced" in done.text


def traced(service, job_id, *options):
    """The document that ``bagua job trace`` writes, and what it prints."""
    path = service.sandbox.folder / "trace.json"
    done = service.call("job", "trace", job_id, "-o", path, *options)
    assert done.code == 0, done.text
    return json.loads(path.read_text()), done.out


def test_a_job_is_traced_while_it_runs(service, job):
    document, out = traced(service, job, "--steps", str(STEPS))
    assert "of 2 ranks; all hosts share one clock" in out and "missing" not in out
    assert_perfetto_takes(document)
    other = document["otherData"]
    assert (other["missing"], other["clock_bound_us"]) == ([], {"node-a": 0, "node-b": 0})
    for rank, node in enumerate(("node-a", "node-b")):
        assert_rank(document, f"rank {rank} ({node})")
        away = "node-b" if node == "node-a" else "node-a"
        for thread in ("operations", "reduction", f"to {away}", f"from {away}"):
            assert events_of(document, f"host {node}", thread), thread


def assert_rank(document, name):
    """Every step has its phases inside it, and every bucket is in every step."""
    training = events_of(document, name, "training")
    steps = [event for event in training if event["cat"] == "step"]
    numbers = [event["args"]["step"] for event in steps]
    assert numbers == list(range(numbers[0], numbers[0] + STEPS))
    for step in steps:
        inside = [e for e in training if e["args"] == step["args"] and e is not step]
        for phase in ("forward", "backward", "submit", "wait", "results", "optimizer"):
            found = [e for e in inside if e["cat"] == phase]
            assert found, (name, phase)
            assert all(step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] for e in found)
    names = sorted({e["name"] for e in training if e["cat"] == "submit"})
    assert len(names) >= BUCKETS
    for bucket in names:
        events = events_of(document, name, bucket.removeprefix("submit "))
        for phase in ("bucket", "ready", "submitted", "reduced"):
            assert sorted(e["args"]["step"] for e in events if e["cat"] == phase) == numbers


@pytest.mark.full
def test_what_a_step_waits_for_and_what_can_not_be_traced(service, job):
    shown = service.call("job", "show", job).out
    for words in ("% computation", "% waiting for rank 1", "rank 1 on node-b computes"):
        assert words in shown, shown
    stall = service.sandbox.folder / "stall"
    stall.touch()
    try:
        done = service.call("job", "trace", job, "-o", service.sandbox.folder / "stalled.json", "--timeout", "1.5")
    finally:
        stall.unlink()
    assert "rank 1 recorded 0 of 5 steps in 1.5 s: it computes for long, waits, or trains no model" in done.out
    document, _ = traced(service, job, "--steps", "1")  # and the next trace is a whole one
    assert document["otherData"]["missing"] == []
    done = service.call("job", "trace", "job-nothing")
    assert done.code != 0 and "job-nothing" in done.text and "Traceback" not in done.text
    waiting = service.submit("--nnodes", "3", service.sandbox.folder / "train.py", "x", "y")
    done = service.call("job", "trace", waiting)
    assert done.code != 0 and "waits for nodes" in done.text
    service.call("job", "cancel", waiting)


OTHER_CLOCK = ("unshare", "--time", "--monotonic", "5000", "--fork")


@pytest.mark.full
def test_hosts_with_other_clocks_come_on_one(idle_service):
    """CLOCK_MONOTONIC of node-b is 5000 s ahead, as that of another machine may be."""
    if subprocess.run([*OTHER_CLOCK, "true"], capture_output=True).returncode:
        pytest.skip("needs namespaces of time (root, unshare of util-linux 2.33)")
    service = idle_service
    service.start_coordinator()
    service.start_node("node-a", 1)
    service.start_node("node-b", 1, prefix=OTHER_CLOCK)
    sandbox = service.sandbox
    script, stop = sandbox.script("train.py", TRAIN), sandbox.folder / "stop"
    job_id = service.submit("--nnodes", "2", script, stop, sandbox.folder / "stall")
    service.wait_for_state(job_id, ["running"], within=DEADLINE_S)
    sandbox.wait_until(lambda: service.ranks_that_report(job_id) == 2, DEADLINE_S)
    document, out = traced(service, job_id, "--steps", str(STEPS))
    stop.touch()
    assert_perfetto_takes(document)
    bounds = document["otherData"]["clock_bound_us"]
    assert bounds["node-a"] == 0 < bounds["node-b"] < 2e6
    assert "of the coordinator's" in out
    mine, others = (events_of(document, name, "bucket 0") for name in ("rank 0 (node-a)", "rank 1 (node-b)"))
    submitted = {e["args"]["step"]: e["ts"] for e in others if e["cat"] == "submitted"}
    done = {e["args"]["step"]: e["ts"] + e["dur"] for e in mine if e["cat"] == "reduced"}
    assert submitted.keys() & done.keys()
    for step in submitted.keys() & done.keys():  # no result before all have submitted
        assert done[step] >= submitted[step] - bounds["node-b"]
    service.wait_for_state(job_id, ["succeeded"], within=DEADLINE_S)
