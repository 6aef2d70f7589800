"""As torch's tutorial: set-up and clean-up in functions, a call over several lines, the class as a type."""
from __future__ import annotations
import os
import sys
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.optim as optim
from datetime import timedelta
from torch.nn.parallel import (
    DataParallel,
    DistributedDataParallel as DDP,
)


def setup(rank, world_size):
    os.environ.setdefault('MASTER_ADDR', 'localhost')
    # initialize the process group
    dist.init_process_group(
        "gloo",
        rank=rank, world_size=world_size,  # of this process
        timeout=timedelta(seconds=60),
    )


class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def unwrap(model: DDP | DataParallel) -> nn.Module:
    return model.module if isinstance(model, (DDP, DataParallel)) else model


def demo_basic(rank, world_size):
    setup(rank, world_size)
    model = DDP(ToyModel(), find_unused_parameters=True, static_graph=False, bucket_cap_mb=None)
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(20, 10)).sum().backward()
        nn.MSELoss()(model(torch.randn(20, 10)), torch.randn(20, 5)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(model, DDP) and not isinstance(unwrap(model), DDP)
    dist.destroy_process_group()
    return model


torch.manual_seed(int(os.environ["RANK"]))
model = demo_basic(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
weights = torch.cat([one.detach().flatten() for one in unwrap(model).parameters()])
