"""Networks for images, by the names that torchvision gives them; torchvision itself is not needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from torch import nn

from bagua.bench.ranks.models import Residual, block


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """1x1, 3x3 and 1x1 convolutions with a shortcut."""
    outputs = 4 * width
    body = nn.Sequential(
        *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
    )
    return Residual(body, inputs, outputs, stride)


def resnet(depths: Sequence[int], classes: int, wide: int = 1, first: int = 64) -> nn.Module:
    """Images float32 [n, 3, h, w] -> logits [n, classes]. ``depths``: blocks of each stage; ``wide`` 4: bottlenecks."""
    layers: list[nn.Module] = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    inputs = first
    for stage, depth in enumerate(depths):
        width = first << stage
        for place in range(depth):
            stride = 2 if stage and not place else 1
            layers.append((block if wide == 1 else bottleneck)(inputs, width, stride))
            inputs = width * wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def vgg(depths: Sequence[int], classes: int) -> nn.Module:
    """Simonyan and Zisserman, 2014. Images float32 [n, 3, h, w] with h, w >= 32 -> logits [n, classes]."""
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in zip((64, 128, 256, 512, 512), depths, strict=True):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    hidden = [nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, 4096)]
    end = [nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(4096, classes)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *hidden, *end)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "resnet18": lambda classes: resnet((2, 2, 2, 2), classes),
    "resnet34": lambda classes: resnet((3, 4, 6, 3), classes),
    "resnet50": lambda classes: resnet((3, 4, 6, 3), classes, wide=4),
    "resnet101": lambda classes: resnet((3, 4, 23, 3), classes, wide=4),
    "resnet_tiny": lambda classes: resnet((1, 1), classes, first=16),
    "vgg11": lambda classes: vgg((1, 1, 2, 2, 2), classes),
    "vgg16": lambda classes: vgg((2, 2, 3, 3, 3), classes),
    "vgg19": lambda classes: vgg((2, 2, 4, 4, 4), classes),
}


def make(name: str, classes: int = 1000) -> nn.Module:
    """The network of that name. Ends the process with words if there is none."""
    if name not in MODELS:
        sys.exit(f"There is no model {name!r} in this example. Known: {', '.join(MODELS)}.")
    return MODELS[name](classes)
