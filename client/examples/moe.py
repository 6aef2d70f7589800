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
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.examples import _common
from bagua.examples.digits import RESULT, load_digits, shift

WIDTH = 64
NEEDED_ACCURACY = 0.95
BALANCE = 0.01  # Factor of the auxiliary loss


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
        expert: nn.Module = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.mixed = local_experts > 0
        if self.mixed:
            capacity, noise = (1.25, 2.0), "RSample"
            expert = bagua.moe.MoE(WIDTH, expert, local_experts, k, 0.0, *capacity, noisy_gate_policy=noise)
        self.experts = expert
        self.classifier = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        found = self.features(images)
        if not self.mixed:
            return self.classifier(found + self.experts(found)), found.new_zeros(())
        computed, balance, _ = self.experts(found)
        return self.classifier(found + computed), balance


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank and returns the outcome of the job."""
    _common.take_algorithm(options)
    training, held_out = load_digits()
    loader = _common.share(training, options.batch_size, options.seed)
    torch.manual_seed(options.seed + bagua.get_rank())  # with_bagua copies rank 0's parameters, but no experts
    model = ExpertNet(options.num_local_experts, options.k)
    total = options.epochs * len(loader)
    optimizer = _common.make_optimizer(model.parameters(), options.lr, total)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total)
    model = model.with_bagua([optimizer])  # gradient all-reduce, or what --algorithm says

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        logits, balance = model(shift(images))
        loss: Tensor = F.cross_entropy(logits, labels) + BALANCE * balance
        return loss

    def right() -> float:
        return _common.accuracy(model, held_out, logits_of=lambda model, images: model(images)[0])

    fitted = _common.fit(loader, optimizer, schedule, loss_of, right, range(options.epochs))
    _common.finish(model)
    if options.save_model:
        bagua.checkpoint.save_checkpoint(fitted.steps, options.save_model, model, optimizer, schedule)
    return _common.outcome(model, fitted.steps, fitted.seconds, {RESULT: right()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = _common.parser(__doc__, epochs=15, batch_size=32, lr=3e-3)
    _common.add_algorithm(parser)
    parser.add_argument("--num-local-experts", type=int, default=1, help="on each rank; 0: a dense layer (1)")
    parser.add_argument("--k", type=int, choices=(1, 2), default=1, help="experts for each image")
    parser.add_argument(
        "--save-model",
        nargs="?",
        const="digits_moe",
        metavar="FOLDER",
        help="write a checkpoint (digits_moe)",
    )
    options = parser.parse_args(arguments)
    _common.need("sklearn")
    return _common.run(options, train, RESULT, NEEDED_ACCURACY)


if __name__ == "__main__":
    sys.exit(main())
