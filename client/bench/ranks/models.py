"""The models of ``bagua bench train``, with one fixed batch each: shapes of common kinds of training, data of noise.

Those named ``-s`` have a quarter of the width, and so about a 16th of the parameters and of the computation: for slow
networks, where a step of the others takes many seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model and the loss of it on one batch, which stays in memory."""

    model: nn.Module
    loss_of: Callable[[nn.Module], Tensor]


class Residual(nn.Module):
    """A body of convolutions with a shortcut (He et al., 2015, "Deep Residual Learning for Image Recognition")."""

    def __init__(self, body: nn.Module, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        return F.relu(self.body(images) + self.shortcut(images))


def block(inputs: int, outputs: int, stride: int) -> Residual:
    """Two 3x3 convolutions with a shortcut."""
    body = nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)),
        *(nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)),
    )
    return Residual(body, inputs, outputs, stride)


class ResNet(nn.Module):
    """ResNet-18 for small images and ten classes: a stem of 3x3 with stride 2. 11.2 M parameters with a width of 64."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        blocks = [block(width, width, 1), block(width, width, 1)]
        for inputs in (width, 2 * width, 4 * width):
            blocks += [block(inputs, 2 * inputs, 2), block(2 * inputs, 2 * inputs, 1)]
        self.features = nn.Sequential(*stem, *blocks)
        self.classes = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) -> logits (n, 10)."""
        return self.classes(self.features(images).mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Six pre-norm layers over words: 26.3 M parameters with a width of 512 and 7,168 words."""

    TOKENS = 128

    def __init__(self, width: int = 512, words: int = 7168) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(self.TOKENS, width))
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        # norm_first rules nested tensors out, and torch would warn of it.
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Words (n, at most 128) of int64 -> logits (n, as many, words) of the word that follows each."""
        hidden = self.words(tokens) + self.places[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(hidden, mask=mask, is_causal=True))  # type: ignore[no-any-return]


def mlp(width: int = 4096, batch: int = 32) -> Workload:
    """Four layers: 67.1 M parameters with a width of 4096, all of them in few large tensors."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    inputs = torch.randn(batch, width)
    return Workload(nn.Sequential(*layers), lambda model: model(inputs).square().mean())


def resnet(width: int = 64, batch: int = 32) -> Workload:
    """A small ResNet on images of 3x32x32."""
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    return Workload(ResNet(width), lambda model: F.cross_entropy(model(images), labels))


def transformer(width: int = 512, words: int = 7168, batch: int = 8, length: int = Transformer.TOKENS) -> Workload:
    """A small language model on sequences of ``length`` tokens."""
    tokens = torch.randint(words, (batch, length + 1))

    def loss_of(model: nn.Module) -> Tensor:
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(Transformer(width, words), loss_of)


def tiny(batch: int = 8) -> Workload:
    """1,000 parameters: nothing but the cost of a step itself."""
    inputs = torch.randn(batch, 24)
    model = nn.Sequential(nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 16))
    return Workload(model, lambda model: model(inputs).square().mean())


# By name. ``batch``: samples of the batch, where it is not the usual one. ``length``: tokens of a transformer's.
WORKLOADS: dict[str, Callable[..., Workload]] = {
    "mlp": mlp,
    "resnet": resnet,
    "transformer": transformer,
    "tiny": tiny,
    "mlp-s": functools.partial(mlp, 1024),
    "resnet-s": functools.partial(resnet, 16),
    "transformer-s": functools.partial(transformer, 128, 1792),
}
