"""Remedies of docs/runbooks.md that the alerts' own tests don't show: done as the page says, on a service that runs."""

import os
import re

import httpx
import pytest
from rig.limits import SOON_S
from rig.ports import free_port

from bagua.base.daemon_process import daemon_pid
from bagua.chaos import sockets

pytestmark = [
    pytest.mark.full,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: connections of other processes"),
]

TRAIN = """
    import pathlib, sys
    import torch
    import bagua.torch_api as bagua

    bagua.init_process_group()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = model.with_bagua([optimizer])
    stop, step = torch.zeros(1), 0
    while not stop.item():
        step += 1
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        bagua.report(step=step)
        stop = torch.tensor([float(pathlib.Path(sys.argv[1]).exists())])
        bagua.allreduce_inplace(stop, op=bagua.ReduceOp.MAX)
"""
GARBAGE = b"no frame" * 8
DAMAGED = r"host (\d) \(rank (\d)\), stream \d: a frame header is damaged"


def refused(port):
    """The counter that BaguaFramesRefused looks at, of the node with this port of metrics."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=SOON_S, trust_env=False).text
    [value] = re.findall(r"^bagua_node_refused_frames_total (\S+)$", text, re.MULTILINE)
    return float(value)


def test_frames_refused(idle_service):
    """Node b sends what is no frame. The runbook leads from the alert to b; without b the job trains again."""
    service, sandbox = idle_service, idle_service.sandbox
    service.start_coordinator()
    ports = {name: free_port() for name in "abc"}
    nodes = {name: service.start_node(name, 1, "--metrics-port", str(ports[name])) for name in "ab"}
    stop = sandbox.folder / "stop"

    def step_of(job):
        return int((service.job(job)["progress"] or {"step": 0})["step"])

    def nodes_of(job):
        return {rank["node_id"] for rank in service.job(job)["ranks"]}

    job = service.submit("--nnodes", "2", "--elastic", sandbox.script("train.py", TRAIN), stop)
    sandbox.wait_until(lambda: step_of(job) > 5, SOON_S)
    assert sockets.corrupt(daemon_pid(nodes["b"].pid), int(service.address.rpartition(":")[2]), GARBAGE) == 1

    # The alert, and what to look at.
    sandbox.wait_until(lambda: refused(ports["a"]), SOON_S)
    assert refused(ports["b"]) == 0
    found = sandbox.wait_until(
        lambda: re.search(DAMAGED, service.call("job", "explain", job).out), SOON_S, lambda: str(service.job(job))
    )
    shown = service.json("job", "show", job)
    [culprit] = [rank["node_id"] for rank in shown["ranks"] + shown["gone"] if rank["rank"] == int(found[2])]
    assert culprit == "b", shown

    # The remedy.
    counted = refused(ports["a"])
    service.start_node("c", 1, "--metrics-port", str(ports["c"]))
    assert service.call("node", "drain", culprit).code == 0
    sandbox.wait_until(lambda: culprit not in nodes_of(job), SOON_S)
    step = step_of(job)
    sandbox.wait_until(lambda: step_of(job) > step + 5, SOON_S)
    assert culprit not in nodes_of(job)
    stop.touch()
    service.wait_for_state(job, ["succeeded"], SOON_S)
    assert refused(ports["a"]) == counted
