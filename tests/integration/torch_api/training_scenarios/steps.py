"""Steps that programs make in other ways than one call of the model in training mode and one backward pass."""

from __future__ import annotations

import torch
from torch import nn

from bagua.torch_api.data_parallel import DistributedDataParallel
from training_scenarios.support import scenario


@scenario
def two_forward_passes() -> None:
    """Of a model whose buffers are sent before each of them."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    (model(torch.randn(8, 4)) - model(torch.randn(8, 4))).mean().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
