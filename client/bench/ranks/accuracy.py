"""Trains the examples' models with one algorithm after the other, on the same ranks and the same samples.

What a run reports: the result of the mean of all replicas at the end, bytes that host 0 sent per step, and the curve:
(step, seconds, bytes, mean training loss of all ranks since the point before).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.base import algorithm_choice
from bagua.bench.ranks import harness
from bagua.examples import _common, charlm, digits

CURVE_POINTS = 24
CHARACTERS = 1_000_000
HELD_OUT_WINDOWS = 256

Loss = Callable[[nn.Module], Tensor]  # the loss on the next batch of this rank


class Digits:
    """The example's network on its data; ``epochs`` follow each other without an end.

    ``validation``: measured on a fifth of the training data, which is taken out of it; held-out images stay unseen.
    """

    def __init__(self, validation: bool) -> None:
        training, self.held_out = digits.load_digits()
        self.images, self.labels = training.tensors
        if validation:
            count = len(self.labels) // 5
            self.held_out = TensorDataset(self.images[:count], self.labels[:count])
            self.images, self.labels = self.images[count:], self.labels[count:]

    def model(self) -> nn.Module:
        """Makes the model, with parameters by torch's seed."""
        return digits.DigitsNet()

    def batches(self, seed: int, size: int) -> Loss:
        """Batches of this rank: its share of every epoch's permutation, which is the same on all ranks."""
        rank, ranks = bagua.get_rank(), bagua.get_world_size()
        order = torch.Generator().manual_seed(seed)
        left: list[int] = []
        torch.manual_seed(1000 * seed + rank)  # ranks shift their images differently

        def loss(model: nn.Module) -> Tensor:
            nonlocal left
            if len(left) < size:
                left = torch.randperm(len(self.labels), generator=order).tolist()[rank::ranks]
            chosen, left = left[:size], left[size:]
            return F.cross_entropy(model(digits.shift(self.images[chosen])), self.labels[chosen])

        return loss

    def value(self, model: nn.Module) -> float:
        """Accuracy on images that were not trained on."""
        return digits.accuracy(model, self.held_out)


class CharacterModel:
    """The example's transformer, smaller, on a part of its text. ``validation``: measured on the end of the training
    text, which is taken out of it."""

    def __init__(self, validation: bool) -> None:
        text = charlm.read_library(CHARACTERS)
        for _ in range(1 + validation):
            border = int(len(text) * (1 - charlm.HELD_OUT_SHARE))
            text, held_out = text[:border], text[border:]
        self.training, self.held_out = text, held_out

    def model(self) -> nn.Module:
        """Makes the model, with parameters by torch's seed."""
        return charlm.CharTransformer(width=32, layers=1, heads=4)

    def batches(self, seed: int, size: int) -> Loss:
        """Random windows, others on every rank."""
        # Two ranks never have the same, whatever their seeds.
        generator = torch.Generator().manual_seed(seed * 10_007 + bagua.get_rank())
        return lambda model: charlm.loss_of(model, *charlm.draw(self.training, size, generator))

    @torch.no_grad()
    def value(self, model: nn.Module) -> float:
        """Loss on windows of text that was not trained on, always the same."""
        windows = charlm.draw(self.held_out, HELD_OUT_WINDOWS, torch.Generator().manual_seed(7))
        return charlm.loss_of(model, *windows).item()


TASKS: dict[str, Callable[[bool], Digits | CharacterModel]] = {"digits": Digits, "charlm": CharacterModel}


def make_optimizers(task: dict[str, Any], setting: dict[str, Any], model: nn.Module) -> list[torch.optim.Optimizer]:
    name, options = algorithm_choice.parse(filled(setting["optimizer"], task["steps"]))
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), **options)]
    rate, betas = task["lr"] * setting["rates"].get(task["name"], 1.0), (0.9, task["beta2"])
    if name == "muon":
        return _common.muon_and_adam(model, rate, betas, **options)
    return [_common.adam_for(name, model.parameters(), rate, task["steps"], betas, **options)]


def filled(text: str, steps: int) -> str:
    """Fills numbers into the places of parts of the training."""
    return text.format(tenth=max(1, steps // 10), quarter=max(1, steps // 4), half=max(1, steps // 2))


def make_algorithm(setting: dict[str, Any], steps: int) -> Algorithm:
    """The algorithm of a setting for a training of so many steps."""
    name, arguments = algorithm_choice.parse(filled(setting["algorithm"], steps))
    return Algorithm.init(name, **arguments)


class Curve:
    """Losses of this rank, with the time and the bytes that this host had sent by then."""

    def __init__(self, steps: int) -> None:
        self.every = max(1, steps // CURVE_POINTS)
        self.began, self.sent_before = time.monotonic(), bagua.communication.statistics().bytes_sent
        self.points: list[tuple[int, float, int]] = []
        self.losses: list[float] = []
        self._sum = torch.zeros(())

    def add(self, step: int, loss: Tensor) -> None:
        """Adds the loss of a step, counted from 1."""
        self._sum += loss.detach()  # with its graph it would keep all activations in memory
        if step % self.every == 0:
            sent = bagua.communication.statistics().bytes_sent - self.sent_before
            self.points.append((step, time.monotonic() - self.began, sent))
            self.losses.append(self._sum.item() / self.every)
            self._sum = torch.zeros(())

    def result(self) -> list[list[float]]:
        """Returns the curve with the losses' mean over ranks. Every rank calls it."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        bagua.allreduce_inplace(losses, bagua.ReduceOp.AVG)
        return [[*point, loss] for point, loss in zip(self.points, losses.tolist(), strict=True)]


def train(task: dict[str, Any], data: Digits | CharacterModel, setting: dict[str, Any], seed: int) -> dict[str, Any]:
    steps = task["steps"]
    torch.manual_seed(seed)
    model = data.model()
    optimizers = make_optimizers(task, setting, model)
    rate = partial(charlm.learning_rate, total=steps)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in optimizers]
    model = model.with_bagua(optimizers, make_algorithm(setting, steps))  # type: ignore[operator]
    loss_of = data.batches(seed, task["batch_size"])
    bagua.barrier()  # starting up is no part of the time
    curve = Curve(steps)
    for step in range(1, steps + 1):
        model.zero_grad()
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        curve.add(step, loss)
    bagua.barrier()
    seconds = time.monotonic() - curve.began
    sent = bagua.communication.statistics().bytes_sent - curve.sent_before
    model.bagua_ddp.close()  # averages in the background are over before that of all replicas is taken
    return {
        "task": task["name"],
        "algorithm": setting["name"],
        "settings": setting,
        "seed": seed,
        "value": value_of_mean(model, data),
        "bytes_per_step": sent / steps,
        "ms_per_step": seconds / steps * 1e3,
        "curve": curve.result(),
    }


def value_of_mean(model: nn.Module, data: Digits | CharacterModel) -> float:
    """The result of the mean of all replicas, on every rank."""
    _common.take_mean(model)
    # One rank is enough: replicas are equal now.
    value = torch.tensor([data.value(model) if bagua.get_rank() == 0 else 0.0], dtype=torch.float64)
    bagua.broadcast(value, 0)
    return value.item()


def measure(config: dict[str, Any]) -> dict[str, Any] | None:
    runs = []
    settings = config["settings"]
    if not hasattr(torch.optim, "Muon"):
        left = [one["name"] for one in settings if one["optimizer"].startswith("muon")]
        settings = [one for one in settings if one["name"] not in left]
        if left and bagua.get_rank() == 0:
            words = f"{', '.join(left)}: left out, torch {torch.__version__} has no Muon; 2.9 has it"
            print(words, file=sys.stderr)
    plan = [(task, setting, seed) for task in config["tasks"] for setting in settings for seed in range(task["seeds"])]
    loaded: dict[str, Digits | CharacterModel] = {}
    for number, (task, setting, seed) in enumerate(plan):
        harness.progress(number, len(plan), f"{task['name']}: {setting['name']}, seed {seed}")
        if task["name"] not in loaded:
            loaded[task["name"]] = TASKS[task["name"]](config["validation"])
        runs.append(train(task, loaded[task["name"]], setting, seed))
    harness.progress(len(plan), len(plan), "done")
    return {"runs": runs}


if __name__ == "__main__":
    harness.run(measure)
