"""Four ranks learn what one process learns on the same global batch.

In float64: sums are rounded in another order there, and fifty steps of training make such a difference 10,000 times as
large. How large depends on the processor's instructions; in float32 it reaches 1e-3.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import Sandbox

TRAIN = """
    import json
    import torch
    import torch.nn.functional as F
    import bagua.torch_api as bagua
    from bagua.examples.{example} import *
    from bagua.torch_api.algorithms import gradient_allreduce

    STEPS, BATCH = 50, {batch}
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    model = {model}
    optimizer = torch.optim.SGD(model.parameters(), lr={lr}, momentum=0.9)
    bagua.init_process_group()
    model.with_bagua([optimizer], gradient_allreduce.GradientAllReduceAlgorithm())
    rank, share = bagua.get_rank(), BATCH // bagua.get_world_size()
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
    "example": "digits",
    "batch": 64,
    "model": "DigitsNet()",
    "lr": 0.05,
    "data": """images, labels = load_digits()[0].tensors
    def batch():
        chosen = torch.randint(len(labels), (BATCH,), generator=generator)[mine]
        return images[chosen].double(), labels[chosen]""",
    "loss": "F.cross_entropy(model(inputs), targets)",
}
CHARLM = {
    "example": "charlm",
    "batch": 8,
    "model": "CharTransformer(width=64)",
    "lr": 0.05,
    "data": """text = read_library(200_000)
    def batch():
        inputs, targets = draw(text, BATCH, generator)
        return inputs[mine], targets[mine]""",
    "loss": "loss_of(model, inputs, targets)",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", [DIGITS, CHARLM], ids=["digits", "charlm"])
def test_loss_of_fifty_steps(sandbox: Sandbox, program: dict[str, object]) -> None:
    script = sandbox.script("train.py", TRAIN.format(**program))
    found = []
    for nnodes, nproc in ((1, 1), (2, 2)):
        done = sandbox.bagua("run", "--nnodes", str(nnodes), "--nproc-per-node", str(nproc), script)
        assert done.code == 0, done.text
        line = next(line for line in done.out.splitlines() if "losses [" in line)
        found.append(json.loads(line[line.index("[", line.index("losses")) :]))
    one, four = found
    assert len(one) == len(four) == 50
    assert one[-1] < one[0]
    assert max(abs(a - b) / abs(a) for a, b in zip(one, four, strict=True)) < 1e-9
