"""Four ranks learn what one process learns on the same global batch.

In float64: sums are rounded in another order there, and fifty steps of training (``--full``) make such a difference
10,000 times as large. How large depends on the processor's instructions; in float32 it reaches 1e-3.
"""

import json

import pytest

HEAD = """
    import json
    import sys
    import torch
    import torch.nn.functional as F
    import bagua.torch_api as bagua
    from bagua.examples.charlm import *
    from bagua.examples.digits import DigitsNet
    from bagua.torch_api.algorithms import gradient_allreduce

    STEPS = int(sys.argv[1])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    bagua.init_process_group()
    rank = bagua.get_rank()
"""
TRAIN = """
    BATCH = {batch}
    torch.manual_seed(0)
    model = {model}
    optimizer = torch.optim.SGD(model.parameters(), lr={lr}, momentum=0.9)
    model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
    share = BATCH // bagua.get_world_size()
    mine = slice(rank * share, (rank + 1) * share)
    generator = torch.Generator().manual_seed(1)
    {data}
    losses = []
    for _ in range(STEPS):
        inputs, targets = batch()
        optimizer.zero_grad()
        loss = {loss}
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        bagua.allreduce_inplace(mean, op=bagua.ReduceOp.AVG)
        losses.append(mean.item())
    if rank == 0:
        print("losses", json.dumps(losses))
"""

DIGITS = {
    "batch": 64,
    "model": "DigitsNet()",
    "lr": 0.05,
    "data": """
    def batch():
        images = torch.rand(BATCH, 1, 8, 8, generator=generator)[mine]
        return images, images.flatten(1)[:, :10].argmax(1)""",
    "loss": "F.cross_entropy(model(inputs), targets)",
}
CHARLM = {
    "batch": 8,
    "model": "CharTransformer(width=64)",
    "lr": 0.05,
    "data": """text = read_library(200_000)
    def batch():
        inputs, targets = draw(text, BATCH, generator)
        return inputs[mine], targets[mine]""",
    "loss": "loss_of(model, inputs, targets)",
}


@pytest.mark.full  # tests/contract compares every algorithm with one process
@pytest.mark.parametrize("steps", [10, 50])
def test_losses(sandbox, steps):
    script = sandbox.script("train.py", HEAD + TRAIN.format(**DIGITS) + TRAIN.format(**CHARLM))
    found = []
    for nnodes, nproc in ((1, 1), (2, 2)):
        done = sandbox.bagua("run", "--nnodes", str(nnodes), "--nproc-per-node", str(nproc), script, str(steps))
        assert done.code == 0, done.text
        lines = [line for line in done.out.splitlines() if "losses [" in line]
        found.append([json.loads(line[line.index("[", line.index("losses")) :]) for line in lines])
    for one, four in zip(*found, strict=True):
        assert len(one) == len(four) == steps
        assert min(one[-5:]) < one[0]  # it learns; batches differ
        assert max(abs(a - b) / abs(a) for a, b in zip(one, four, strict=True)) < 1e-9
    assert len(found[0]) == 2
