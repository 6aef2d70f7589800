"""The sample with which Bagua was announced, for a machine with or without GPUs.

bagua run --nproc-per-node 2 -m bagua.examples.announcement
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import gradient_allreduce


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(32, 64)
        self.fc2 = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), dim=1)


def main() -> None:
    torch.manual_seed(1 + bagua.get_rank())
    if torch.cuda.is_available():
        torch.cuda.set_device(bagua.get_local_rank())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bagua.init_process_group()

    # A task that can be learned: which of four directions is strongest.
    inputs = torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(dim=1))
    sampler: torch.utils.data.distributed.DistributedSampler[torch.Tensor] = (
        torch.utils.data.distributed.DistributedSampler(
            dataset, num_replicas=bagua.get_world_size(), rank=bagua.get_rank()
        )
    )
    train_loader = torch.utils.data.DataLoader(dataset, batch_size=16, sampler=sampler)

    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    algorithm = gradient_allreduce.GradientAllReduceAlgorithm()
    model = model.with_bagua([optimizer], algorithm)

    model.train()
    first = last = 0.0
    for epoch in range(5):
        sampler.set_epoch(epoch)  # else each epoch has the same order
        for batch, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            last = loss.item()
            if epoch == 0 and batch == 0:
                first = last
    place = f"rank {bagua.get_rank()} of {bagua.get_world_size()} (local {bagua.get_local_rank()})"
    print(f"{place}: loss {first:.3f} -> {last:.3f}")
    assert last < first


if __name__ == "__main__":
    main()
