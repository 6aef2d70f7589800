"""A user's script for ``tests/bench/advise.py``: trains a model of ``bagua bench train``, named on the command line."""

import sys

import torch

import bagua.torch_api as bagua
from bagua.bench.ranks.models import WORKLOADS
from bagua.bench.ranks.train import LEARNING_RATE

bagua.init_process_group()
workload = WORKLOADS[sys.argv[1]]()
optimizer = torch.optim.SGD(workload.model.parameters(), lr=LEARNING_RATE)
model = workload.model.with_bagua([optimizer])
for _ in range(100_000):
    optimizer.zero_grad()
    workload.loss_of(model).backward()
    optimizer.step()
