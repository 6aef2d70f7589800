"""A convolutional network learns MNIST, as in the original; where MNIST is not at hand, digits that are drawn.

    python -m bagua.distributed.launch --nproc_per_node=2 -m bagua.examples.mnist --algorithm gradient_allreduce
    bagua run --nproc-per-node 2 -m bagua.examples.mnist --fuse-optimizer --save-model

``--data FOLDER`` has MNIST's four files (train-images-idx3-ubyte and so on, .gz or not), in the folder itself or in
MNIST/raw below it. Without them the program draws 6,000 digits of seven segments, shifted and with noise.
Ends with exit code 1 if the replicas differ.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.examples import _common

RESULT = "test accuracy"
SAVED = "mnist_cnn.pt"
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels

# Bars of each digit. 0, 3, 6: the bars from top to bottom; 1, 2, 4, 5: left and right above, left and right below.
SEGMENTS = ("012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356")
# Rows from, to, columns from, to.
PLACES = {
    **{"0": (5, 7, 9, 19), "3": (13, 15, 9, 19), "6": (21, 23, 9, 19)},
    **{"1": (5, 15, 8, 10), "2": (5, 15, 18, 20), "4": (13, 23, 8, 10), "5": (13, 23, 18, 20)},
}


class Net(nn.Module):
    """Images float32 [batch, 1, 28, 28] -> log-probabilities float32 [batch, 10]. 1.2 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        found = F.relu(self.conv2(F.relu(self.conv1(images))))
        found = self.dropout1(F.max_pool2d(found, 2)).flatten(1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(found)))), dim=1)


def read_idx(folder: Path, name: str) -> Tensor:
    """The uint8 tensor in a file of MNIST's format: two zero bytes, type 8, the number of dimensions, the sizes as
    big-endian 32-bit numbers, then the elements. Ends the process with words for a file of another kind."""
    path = folder / name
    data = path.read_bytes() if path.exists() else gzip.decompress((folder / f"{name}.gz").read_bytes())
    sizes = [int.from_bytes(data[4 * place : 4 * place + 4], "big") for place in range(1, 1 + data[3])]
    found = torch.frombuffer(bytearray(data), dtype=torch.uint8)[4 + 4 * len(sizes) :]
    if data[:3] != b"\x00\x00\x08" or found.numel() != torch.Size(sizes).numel():
        sys.exit(f"{folder / name} is no file of MNIST, or it was cut off.")
    return found.view(sizes)


def read_mnist(folder: Path, part: str) -> TensorDataset:
    """``part``: "train" or "t10k"."""
    images = read_idx(folder, f"{part}-images-idx3-ubyte").unsqueeze(1).float() / 255
    labels = read_idx(folder, f"{part}-labels-idx1-ubyte").long()
    return TensorDataset((images - MEAN) / DEVIATION, labels)


def draw(count: int, seed: int) -> TensorDataset:
    """Digits of seven segments, shifted by up to four pixels, of different brightness, with noise."""
    shapes = torch.zeros(10, 28, 28)
    for digit, segments in enumerate(SEGMENTS):
        for top, bottom, left, right in (PLACES[segment] for segment in segments):
            shapes[digit, top:bottom, left:right] = 1
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=random)
    shift = torch.randint(-4, 5, (2, count, 1, 1), generator=random)
    places = torch.arange(28)
    rows, columns = (places.view(1, 28, 1) + shift[0]) % 28, (places.view(1, 1, 28) + shift[1]) % 28
    images = shapes[labels.view(-1, 1, 1), rows, columns] * (0.5 + torch.rand(count, 1, 1, generator=random))
    images += 0.3 * torch.randn(count, 28, 28, generator=random)
    return TensorDataset(((images - MEAN) / DEVIATION).unsqueeze(1), labels)


def load(folder: str) -> tuple[TensorDataset, TensorDataset]:
    """Returns (training, test) images float32 [n, 1, 28, 28] and labels int64 [n]."""
    for place in (Path(folder), Path(folder) / "MNIST" / "raw"):
        if list(place.glob("train-images-idx3-ubyte*")):
            return read_mnist(place, "train"), read_mnist(place, "t10k")
    if bagua.get_rank() == 0:
        print(f"MNIST is not in {folder}: digits of seven segments instead.", file=sys.stderr)
    return draw(6000, 1), draw(1000, 2)


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank and returns the outcome of the job."""
    name = _common.take_algorithm(options)
    device = _common.device()
    training, test = load(options.data)
    batch_size = max(1, options.batch_size // bagua.get_world_size())  # that of all ranks is the option's
    loader = _common.share(training, batch_size, options.seed)
    torch.manual_seed(666 + bagua.get_rank() if options.set_deterministic else options.seed)
    model = Net().to(device)
    steps = min(len(loader), options.max_batches or len(loader))
    if name in ("qadam", "one_bit_adam", "zero_one_adam"):
        optimizer = _common.adam_for(name, model.parameters(), 1e-3 * options.lr, options.epochs * steps)
    else:
        optimizer = torch.optim.Adadelta(model.parameters(), lr=options.lr)
    if options.fuse_optimizer:
        optimizer = bagua.contrib.fuse_optimizer(optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: options.gamma ** (step // steps))
    model = model.with_bagua([optimizer], do_flatten=not options.fuse_optimizer)  # what --algorithm says
    fitted = _common.fit(
        loader,
        optimizer,
        schedule,
        loss_of=lambda images, labels: F.nll_loss(model(images.to(device)), labels.to(device)),
        evaluate=lambda: _common.accuracy(model, test, options.test_batch_size),
        epochs=range(options.epochs),
        update=getattr(optimizer, "fuse_step", None),  # of a fused optimizer
        most_batches=options.max_batches,
        report_every=options.log_interval,
    )
    _common.finish(model)
    if options.save_model and bagua.get_rank() == 0:
        torch.save(model.state_dict(), SAVED)
    right = _common.accuracy(model, test, options.test_batch_size)
    return _common.outcome(model, fitted.steps, fitted.seconds, {RESULT: right})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = _common.parser(__doc__, epochs=14, lr=1.0)
    _common.add_algorithm(parser)
    parser.add_argument("--batch-size", type=int, default=64, help="samples of all ranks together in a step (64)")
    parser.add_argument("--test-batch-size", type=int, default=1000)
    parser.add_argument("--gamma", type=float, default=0.7, help="factor of the learning rate after each epoch (0.7)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="steps between reports (10)")
    parser.add_argument("--max-batches", type=int, metavar="N", help="steps of each epoch, if fewer than it has")
    parser.add_argument("--save-model", action="store_true", help=f"writes the weights to {SAVED}")
    parser.add_argument("--set-deterministic", action="store_true", help="the same random numbers every time")
    parser.add_argument("--fuse-optimizer", action="store_true", help="one kernel for many parameters")
    parser.add_argument("--data", default="../data", metavar="FOLDER", help="with MNIST's files (../data)")
    return _common.run(parser.parse_args(arguments), train)


if __name__ == "__main__":
    sys.exit(main())
