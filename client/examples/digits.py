"""A small convolutional network learns handwritten digits: 1797 scans of 8x8 pixels that come with scikit-learn.

    bagua run --nnodes 2 --nproc-per-node 2 -m bagua.examples.digits
    bagua run --nnodes 2 --nproc-per-node 2 --algorithm local_sgd:interval=4 -m bagua.examples.digits

Every rank holds a replica and sees its share of each epoch; gradients are averaged while the backward pass still runs,
unless ``--algorithm`` says otherwise.
Ends with exit code 1 if the held-out accuracy is below 97 % or the replicas differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.examples import _common

HELD_OUT = 360
NEEDED_ACCURACY = 0.97
RESULT = "held-out accuracy"


class DigitsNet(nn.Module):
    """Images float32 [batch, 1, 8, 8] -> logits float32 [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(images))
        return logits


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns (training, held-out) images float32 [n, 1, 8, 8] in 0..1 and labels int64 [n]; always the same split.
    Ends the process, with words, where scikit-learn is not installed.
    """
    _common.need("sklearn")
    from sklearn.datasets import load_digits as scans

    found = scans()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out, training = order[:HELD_OUT], order[HELD_OUT:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[held_out], labels[held_out])


def shift(images: Tensor) -> Tensor:
    """Moves every image [batch, 1, 8, 8] by -1, 0 or 1 pixel in both directions."""
    count = len(images)
    padded = F.pad(images, (1, 1, 1, 1))[:, 0]
    rows = torch.randint(3, (count, 1, 1)) + torch.arange(8).view(1, 8, 1)
    columns = torch.randint(3, (count, 1, 1)) + torch.arange(8).view(1, 1, 8)
    return padded[torch.arange(count).view(count, 1, 1), rows, columns].unsqueeze(1)


@torch.no_grad()
def accuracy(model: nn.Module, dataset: TensorDataset) -> float:
    """Share of the dataset that the model gets right."""
    images, labels = dataset.tensors
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(right)


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank and returns the outcome of the job."""
    training, held_out = load_digits()
    loader = _common.share(training, options.batch_size, options.seed)

    torch.manual_seed(options.seed)  # with_bagua copies the parameters of rank 0 anyway
    model = DigitsNet()
    total = options.epochs * len(loader)
    optimizer = _common.make_optimizer(model.parameters(), options.lr, total)
    model = model.with_bagua([optimizer])  # gradient all-reduce, or what --algorithm says
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=total)
    torch.manual_seed(options.seed + 1 + bagua.get_rank())  # ranks shift their images differently

    fitted = _common.fit(
        loader,
        optimizer,
        schedule,
        loss_of=lambda images, labels: F.cross_entropy(model(shift(images)), labels),
        evaluate=lambda: accuracy(model, held_out),
        epochs=range(options.epochs),
    )
    _common.finish(model)
    return _common.outcome(model, fitted.steps, fitted.seconds, {RESULT: accuracy(model, held_out)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    options = _common.parser(__doc__, epochs=15, batch_size=32, lr=3e-3).parse_args(arguments)
    _common.need("sklearn")
    return _common.run(options, train, RESULT, NEEDED_ACCURACY)


if __name__ == "__main__":
    sys.exit(main())
