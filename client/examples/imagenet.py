"""Trains a network for images on a folder like ImageNet's: DIR/train/CLASS/image and DIR/val/CLASS/image.

    python -m bagua.distributed.launch --nproc_per_node=2 -m bagua.examples.imagenet --arch resnet50 DIR
    bagua run --nproc-per-node 2 -m bagua.examples.imagenet --synthetic 8 --arch resnet18 --epochs 2 DIR

--synthetic N makes such a folder first, with N images in each of ten classes. Images other than PPM need Pillow.
--save-checkpoint writes a checkpoint after each epoch, and --resume goes on from it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

import bagua.torch_api as bagua
from bagua.examples import _common, _vision

RESULT = "validation accuracy"
CLASSES = 10  # of a folder that this program makes
MEAN, DEVIATION = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])  # of ImageNet's channels


def read_image(path: Path) -> Tensor:
    """uint8 [3, height, width]. PPM (P6) is read here, other formats by Pillow."""
    if path.suffix == ".ppm":
        _, width, height, _, pixels = path.read_bytes().split(maxsplit=4)
        flat = torch.frombuffer(bytearray(pixels), dtype=torch.uint8)
        return flat.view(int(height), int(width), 3).permute(2, 0, 1)
    _common.need("PIL")
    from PIL import Image

    with Image.open(path) as image:
        data = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
        return data.view(image.height, image.width, 3).permute(2, 0, 1)


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images in folders named like their classes -> (float32 [3, size, size], number of the class).

    ``training``: a random part of the image, at random mirrored; otherwise its middle.
    """

    def __init__(self, folder: Path, size: int, training: bool) -> None:
        if not folder.is_dir():
            sys.exit(f"There is no folder {folder}. --synthetic N makes one to try with.")
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.images = [(path, n) for n, name in enumerate(self.classes) for path in sorted((folder / name).iterdir())]
        self.size, self.training = size, training

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        path, label = self.images[place]
        image = (read_image(path).float() / 255 - MEAN.view(3, 1, 1)) / DEVIATION.view(3, 1, 1)
        height, width = image.shape[1:]
        side = min(height, width)
        if self.training:
            side = max(1, int(side * math.sqrt(0.5 + 0.5 * torch.rand(()).item())))
            top, left = (int(torch.randint(length - side + 1, ())) for length in (height, width))
        else:
            top, left = (height - side) // 2, (width - side) // 2
        part = image[:, top : top + side, left : left + side]
        if self.training and torch.rand(()) < 0.5:
            part = part.flip(2)
        return F.interpolate(part.unsqueeze(0), (self.size, self.size), mode="bilinear", antialias=True)[0], label


def make_folder(folder: Path, count: int, size: int) -> None:
    """Ten classes of noise, each with a colour of its own: ``count`` images for training and a quarter for validation,
    of ``size`` pixels."""
    random = torch.Generator().manual_seed(0)
    colours = torch.randint(60, 196, (CLASSES, 3, 1, 1), generator=random)
    for part, images in (("train", count), ("val", max(1, count // 4))):
        for label, colour in enumerate(colours):
            place = folder / part / f"class{label}"
            place.mkdir(parents=True, exist_ok=True)
            for number in range(images):
                pixels = (colour + 30 * torch.randn(3, size, size, generator=random)).clamp(0, 255).byte()
                data = bytes(pixels.permute(1, 2, 0).flatten().tolist())
                (place / f"{number}.ppm").write_bytes(b"P6 %d %d 255\n" % (size, size) + data)


def factor(step: int, per_epoch: int, options: argparse.Namespace) -> float:
    """Returns the factor of the learning rate: up during the first epochs, then down at the milestones."""
    epoch = step / per_epoch
    if epoch < options.warmup_epochs:
        return float((step + 1) / (options.warmup_epochs * per_epoch + 1))
    milestones = [int(text) for text in options.milestones.split(",")]
    return float(options.gama ** bisect_right(milestones, epoch))


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank and returns the outcome of the job."""
    name = _common.take_algorithm(options)
    device = _common.device()
    if options.synthetic and bagua.get_local_rank() == 0:
        make_folder(options.folder, options.synthetic, options.image_size)
    bagua.barrier()  # no rank looks into a folder that is half made
    training = ImageFolder(options.folder / "train", options.image_size, training=True)
    validation = ImageFolder(options.folder / "val", options.image_size, training=False)
    loader = _common.share(training, options.batch_size, options.seed, options.workers)
    torch.manual_seed(options.seed)
    model = _vision.make(options.arch, len(training.classes)).to(device)
    steps = min(len(loader), options.prof or len(loader))
    if name in ("qadam", "one_bit_adam", "zero_one_adam"):
        optimizer = _common.adam_for(name, model.parameters(), options.lr / 100, options.epochs * steps)
    else:
        decay = {"momentum": options.momentum, "weight_decay": options.weight_decay}
        optimizer = torch.optim.SGD(model.parameters(), options.lr, **decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps, options))
    start = options.start_epoch
    if options.resume:
        start = bagua.checkpoint.load_checkpoint(options.resume, model, optimizer, schedule)
        print(f"rank {bagua.get_rank()}: from epoch {start} of {options.resume}", flush=True)
    model = model.with_bagua([optimizer])  # gradient all-reduce, or what --algorithm says
    epoch = start

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if options.amp else contextlib.nullcontext():
            return F.cross_entropy(model(images.to(device)), labels.to(device))

    def right() -> float:
        return _common.accuracy(model, validation, options.batch_size, workers=options.workers)

    def end_epoch() -> float:
        nonlocal epoch
        epoch += 1
        if options.save_checkpoint:
            bagua.checkpoint.save_checkpoint(epoch, options.save_checkpoint, model, optimizer, schedule)
        return right()

    epochs = range(start, start if options.evaluate else max(start, options.epochs))
    fitted = _common.fit(
        loader,
        optimizer,
        schedule,
        loss_of,
        end_epoch,
        epochs,
        most_batches=options.prof,
        report_every=options.print_freq,
    )
    _common.finish(model)
    return _common.outcome(model, fitted.steps, fitted.seconds, {RESULT: right()})


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = _common.parser(__doc__, epochs=90)
    _common.add_algorithm(parser, interval=100)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with train and val")
    parser.add_argument("--synthetic", type=int, metavar="N", help="make DIR, with N images for each of ten classes")
    parser.add_argument("--image-size", type=int, default=224, help="pixels (224)")
    parser.add_argument("-a", "--arch", default="resnet18", help=f"{', '.join(_vision.MODELS)} (resnet18)")
    parser.add_argument("-b", "--batch-size", type=int, default=256, help="images of each rank in a step (256)")
    parser.add_argument("-j", "--workers", type=int, default=4, help="processes that load images, for each rank (4)")
    parser.add_argument("--lr", "--learning-rate", type=float, default=0.1, help="of SGD (0.1)")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", "--weight-decay", dest="weight_decay", type=float, default=1e-4)
    parser.add_argument("--warmup-epochs", type=float, default=5, help="the learning rate goes up (5)")
    parser.add_argument("--milestones", default="60,70,80", help="epochs after which it goes down (60,70,80)")
    parser.add_argument("--gama", type=float, default=0.2, help="by this factor (0.2)")
    parser.add_argument("--start-epoch", type=int, default=0)
    parser.add_argument("-p", "--print-freq", type=int, default=10, help="steps between reports (10)")
    parser.add_argument("--resume", default="", metavar="FOLDER", help="go on from the newest checkpoint there")
    parser.add_argument("--save-checkpoint", nargs="?", const="checkpoints", metavar="FOLDER", help="(checkpoints)")
    parser.add_argument("-e", "--evaluate", action="store_true", help="measure the accuracy alone")
    parser.add_argument("--amp", action="store_true", help="bfloat16 where autocast allows it")
    parser.add_argument("--prof", type=int, metavar="N", help="N steps of each epoch, for a profiler")
    parser.add_argument("--pretrained", action="store_true", help="not possible: nothing is downloaded; see --resume")
    options = parser.parse_args(arguments)
    if options.pretrained:
        parser.error("--pretrained: this example downloads nothing. --resume FOLDER starts from a checkpoint.")
    return _common.run(options, train)


if __name__ == "__main__":
    sys.exit(main())
