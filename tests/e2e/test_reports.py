"""Ranks that train report by themselves, whatever their script tells: the dashboard shows all of them."""

import pytest

from bagua.client import Client

TRAIN = """
    import pathlib, sys, time
    import torch
    import bagua.torch_api as bagua
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    bagua.init_process_group()
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm())
    step, stop = 0, torch.zeros(1)
    while not stop.item():
        step += 1
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if bagua.get_rank() == 0:
            bagua.report(step=step, total=step + 1, metrics={"loss": 1.0 / step})
        stop = torch.tensor([float(pathlib.Path(sys.argv[1]).exists())])
        bagua.allreduce_inplace(stop, op=bagua.ReduceOp.MAX)
        time.sleep(0.02)
"""


@pytest.mark.full  # test_trace.py and the dashboard have what ranks report
def test_every_rank_that_trains_reports(service):
    sandbox = service.sandbox
    stop = sandbox.folder / "stop"
    job_id = service.submit("--nnodes", "2", "--name", "reports", sandbox.script("train.py", TRAIN), stop)
    seen = {0: [], 1: []}
    with Client(service.address, token=(sandbox.state / "token").read_text()) as client:
        for update in client.watch(job_id):
            if update.WhichOneof("update") == "progress":
                seen[update.progress.rank].append(update.progress)
            if min(map(len, seen.values())) >= 2:
                stop.touch()
        # The program's own report stays the one of the job.
        assert client.get(job_id).progress.metrics["loss"] > 0
    assert not seen[0][-1].by_itself  # a first step that takes long may come before the first report of the program
    assert {one.by_itself for one in seen[1]} == {True}
    for reports in seen.values():
        first, last = reports[0], reports[-1]
        assert last.step > first.step and last.metrics["compute ms"] > 0
        assert last.bytes.inside + last.bytes.between > first.bytes.inside + first.bytes.between
    service.wait_for_state(job_id, ["succeeded"], within=60)
