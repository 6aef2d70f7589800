"""Handwritten digits with a mixture of experts: a small convolutional network whose middle layer has experts on every
rank, of which one or two compute each image.

    bagua run --nproc-per-node 4 -m bagua.examples.moe
    bagua run --nnodes 2 --nproc-per-node 2 -m bagua.examples.moe --num-local-experts 2 --k 2

Gradients of the experts stay where they are; those of all other parameters are averaged. Ends with exit code 1 if the
held-out accuracy is below 95 % or the replicas of what all ranks share differ.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import bagua.torch_api as bagua
from bagua.examples import _common
from bagua.examples.digits import load_digits, shift

WIDTH = 64
NEEDED_ACCURACY = 0.95
BALANCE = 0.01
"""Factor of the auxiliary loss."""


class ExpertNet(nn.Module):
    """Images float32 [batch, 1, 8, 8] -> logits float32 [batch, 10], auxiliary loss."""

    def __init__(self, local_experts: int, k: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, WIDTH),
            nn.ReLU(),
        )
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.experts = bagua.moe.MoE(
            WIDTH,
            expert,
            local_experts,
            k=k,
            capacity_factor=1.25,
            eval_capacity_factor=2.0,
            noisy_gate_policy="RSample",
        )
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.features(images)
        computed, balance, _ = self.experts(found)
        return self.classifier(found + computed), balance


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Share of the dataset that the model gets right. All ranks call it, each with a part of the images."""
    images, labels = (tensor[bagua.get_rank() :: bagua.get_world_size()] for tensor in dataset.tensors)
    model.eval()
    right = (model(images)[0].argmax(dim=1) == labels).sum().double()
    model.train()
    bagua.allreduce_inplace(right)
    return float(right) / len(dataset)


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank and returns the outcome of the job."""
    training, held_out = load_digits()
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(
        training, num_replicas=bagua.get_world_size(), rank=bagua.get_rank(), seed=options.seed
    )
    loader = DataLoader(training, batch_size=options.batch_size, sampler=sampler)
    torch.manual_seed(options.seed + bagua.get_rank())  # with_bagua copies rank 0's parameters, but no experts
    model = ExpertNet(options.num_local_experts, options.k)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    total = options.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total)
    model = model.with_bagua([optimizer])

    bagua.barrier()
    started, step, right = time.monotonic(), 0, 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            logits, balance = model(shift(images))
            loss = F.cross_entropy(logits, labels)
            (loss + BALANCE * balance).backward()
            optimizer.step()
            schedule.step()
            step += 1
            if bagua.get_rank() == 0:
                bagua.report(step=step, total=total, metrics={"loss": loss.item(), "acc": right})
        right = accuracy(model, held_out)
    seconds = time.monotonic() - started
    if options.save_model:
        bagua.checkpoint.save_checkpoint(step, options.save_model, model, optimizer, schedule)
    model.bagua_ddp.close()
    return _common.outcome(model, steps=step, seconds=seconds, results={"held-out accuracy": right})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-local-experts", type=int, default=1, help="on each rank")
    parser.add_argument("--k", type=int, choices=(1, 2), default=1, help="experts for each image")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-model", metavar="FOLDER", help="write a checkpoint at the end")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    options = parser.parse_args(arguments)

    _common.need("sklearn")
    bagua.init_process_group()
    outcome = train(options)
    if bagua.get_rank() == 0:
        outcome.print(options.output)
    return outcome.verdict("held-out accuracy", at_least=NEEDED_ACCURACY)


if __name__ == "__main__":
    sys.exit(main())
