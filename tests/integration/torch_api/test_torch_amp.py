"""torch.amp: scaled gradients, half precision."""

import pytest
import torch
from rig.ranks import placing
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, Codec

ALGORITHMS = {
    **{name: Algorithm.init(name) for name in ("gradient_allreduce", "bytegrad", "top_k", "power_sgd")},
    **{
        codec: Algorithm.init("gradient_allreduce", codec=codec)
        for codec in ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "int2", "onebit")
    },
    "topk": Algorithm.init("gradient_allreduce", codec=Codec("topk", density=0.2, error_feedback=True)),
}
"""Those after whose exchange all ranks hold the same gradients."""
BROKEN = 2  # in this step one rank's gradients are infinite


def rank_scales():
    """The scaler and the parameters after each step, for every algorithm."""
    rank, device = bagua.get_rank(), placing.device()
    found = []
    for name, algorithm in ALGORITHMS.items():
        torch.manual_seed(rank)
        model = placing.placed(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model = model.with_bagua([optimizer], algorithm)
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=100)
        for step in range(4):
            inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(step * 10 + rank)).to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = model(inputs).float().square().mean()
            if step == BROKEN and rank == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()
            found.append({"name": name, "step": step, "scale": scaler.get_scale(), "weights": weights})
        model.bagua_ddp.close()
    return found


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_all_ranks_skip_the_same_step(pools, device):
    first, *others = pools([0, 1], [2], environment=placing.environment(device, "staged")).run(rank_scales)
    before = first[0]["weights"]
    for number, mine in enumerate(first):
        assert mine["scale"] == (512.0 if mine["step"] >= BROKEN else 1024.0), mine
        assert bool(mine["weights"].isfinite().all()), mine
        assert torch.equal(mine["weights"], before) == (mine["step"] == BROKEN or number == 0), mine
        before = mine["weights"]
        for other in others:
            assert other[number]["scale"] == mine["scale"]
            assert torch.equal(other[number]["weights"], mine["weights"]), mine
