"""A small transformer learns, character by character, the text of Python's own standard library.

    bagua run --nproc-per-node 2 -m bagua.examples.charlm --steps 200
    bagua run --nproc-per-node 2 --algorithm bytegrad:hierarchical=false -m bagua.examples.charlm --steps 200

Every machine with Python has this text: a few megabytes of real source code. Prints the loss before and after, and a
sample of what the model writes.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bagua.torch_api as bagua
from bagua.examples import _common

# Newline and printable ASCII; every other character is read as ``?``.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))

MAX_CHARACTERS = 4_000_000
HELD_OUT_SHARE = 0.05
CONTEXT = 64


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer: float32 [batch, time, width] -> the same shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, time_steps, width = hidden.shape
        parts = self.query_key_value(self.norm_attention(hidden))
        query, key, value = parts.view(batch, time_steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, time_steps, width))
        result: Tensor = hidden + self.feed_forward(self.norm_feed_forward(hidden))
        return result


class CharTransformer(nn.Module):
    """Characters int64 [batch, time <= CONTEXT] -> logits float32 [batch, time, len(ALPHABET)] of the next ones."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.characters.weight  # one matrix reads and writes characters
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        hidden = self.characters(characters) + self.positions[: characters.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits


def read_library(limit: int = MAX_CHARACTERS) -> Tensor:
    """The sources of the standard library, in the order of their names, as int64 [characters] of places in ALPHABET."""
    places = {character: place for place, character in enumerate(ALPHABET)}
    unknown = places["?"]
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [places.get(character, unknown) for character in text.replace("\t", "    ")]
        if len(found) >= limit:
            break
    return torch.tensor(found[:limit])


def draw(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``count`` random windows of the text and the same, one character further: both int64 [count, CONTEXT]."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats per character."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor) -> float:
    """Loss on 64 windows of the held-out text, the same windows each time."""
    return loss_of(model, *draw(text, 64, torch.Generator().manual_seed(7))).item()


@torch.no_grad()
def write(model: nn.Module, beginning: str, length: int) -> str:
    """Lets the model go on from ``beginning`` for ``length`` characters."""
    generator = torch.Generator().manual_seed(11)
    text = [ALPHABET.index(character) for character in beginning]
    for _ in range(length):
        logits = model(torch.tensor([text[-CONTEXT:]]))[0, -1] / 0.7
        text.append(int(torch.multinomial(logits.softmax(dim=0), 1, generator=generator)))
    return "".join(ALPHABET[place] for place in text)


def learning_rate(step: int, total: int) -> float:
    """Factor of the learning rate: up over the first tenth, then down along a cosine."""
    warm_up = max(1, total // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - warm_up) / max(1, total - warm_up))) / 2


def train(options: argparse.Namespace) -> _common.Outcome:
    """Trains on every rank, lets the model of rank 0 write, and returns the outcome of the job."""
    text = read_library()
    held_out_from = int(len(text) * (1 - HELD_OUT_SHARE))
    training, held_out = text[:held_out_from], text[held_out_from:]

    torch.manual_seed(options.seed)
    model = CharTransformer()
    optimizer = _common.make_optimizer(model.parameters(), options.lr, options.steps, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options.steps))
    model = model.with_bagua([optimizer])  # gradient all-reduce, or what --algorithm says
    before = held_out_loss(model, held_out)

    # Ranks draw different windows.
    generator = torch.Generator().manual_seed(options.seed * 10_007 + bagua.get_rank())
    bagua.barrier()
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        loss = loss_of(model, *draw(training, options.batch_size, generator))
        loss.backward()
        optimizer.step()
        schedule.step()
        if bagua.get_rank() == 0:
            speed = step / (time.monotonic() - started)
            bagua.report(step=step, total=options.steps, metrics={"loss": loss.item(), "steps/s": speed})
    seconds = time.monotonic() - started
    _common.finish(model)
    results = {"held-out loss before": before, "held-out loss after": held_out_loss(model, held_out)}
    if bagua.get_rank() == 0 and options.output == "text" and options.sample:
        print(f"The model writes:\n{write(model, 'def ', options.sample)}\n")
    return _common.outcome(model, steps=options.steps, seconds=seconds, results=results)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = _common.parser(__doc__, lr=6e-3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch-size", type=int, default=24, help=f"windows of {CONTEXT} characters per rank")
    parser.add_argument("--sample", type=int, default=400, help="characters to write at the end")
    return _common.run(parser.parse_args(arguments), train)


if __name__ == "__main__":
    sys.exit(main())
