"""A habit: a program that does what programs do, written once, and run under torch's DistributedDataParallel on Gloo
and under each of our ways.

A program is a function with ``habit`` before it, in a file of ``programs``:

    @habit(kind=1)
    def keeps_gradients(by: Way) -> Found:
        net, optimizer = mlp()
        model = by.wrap(net, optimizer)
        ...
        return {"kept": torch.equal(kept, copy), "weights": weights(net)}

What it returns is compared, rank by rank, with what it returned under torch's. It gets the same batches and weights
everywhere, must train in float32 or float64 on the CPU, and takes milliseconds.
"""

from __future__ import annotations

import copy
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Found = dict[str, Any]
"""Tensors, numbers, truth values and words by name, or lists of them."""


def batch_of(rank, step, *shape):
    """See ``Way.batch``."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(*(shape or (8, 4)), generator=generator)


class Way(ABC):
    """How the program's model becomes a distributed one, on this rank."""

    name: str
    exact = True
    """Whether gradients are the averages of all ranks', and not something near them."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size

    @abstractmethod
    def wrap(self, net, *optimizers, **options):
        """The model to call instead of ``net``. ``options``: of torch's DistributedDataParallel; a way that has
        no such option takes no notice."""

    @abstractmethod
    def no_sync(self, model):
        """The block in which backward passes of ``model`` stay on this rank."""

    def batch(self, step, *shape):
        """Normal, other numbers for each rank and step; [8, 4] if not told."""
        return batch_of(self.rank, step, *shape)

    def mean(self, tensor):
        """The average of all ranks' tensors, by an all-reduce of the program's own."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def close(self):  # noqa: B027 - some have nothing to end
        """Ends what ``wrap`` began."""


Program = Callable[[Way], Found]


@dataclass(frozen=True)
class Habit:
    """A program, and what ``habit`` was told of it."""

    name: str
    kind: int
    program: Program
    only: tuple[str, ...]
    without: tuple[str, ...]
    oracle: bool


HABITS = {}


def habit(kind, only=(), without=(), oracle=True):
    """Adds a program to the suite.

    Args:
        kind: 1: it touches gradients and weights; 2: its steps don't go through ``model(...)`` in train mode; 3: it
            shares its process with the library; 4: it ends.
        only: Names of ways; empty: all.
        without: Names of ways that can't run it.
        oracle: False: torch's can't run it, or gives wrong results without a word. Truth values that the program finds
            must be true.
    """

    def add(program):
        name = program.__name__
        if name in HABITS:
            raise ValueError(f"There is another habit {name!r}.")
        HABITS[name] = Habit(name, kind, program, only, without, oracle)
        return program

    return add


def load_habits():
    """All habits by name, in the order of files and lines."""
    for path in sorted(Path(__file__).parent.joinpath("programs").glob("*.py")):
        importlib.import_module(f"habits.programs.{path.stem}")
    return HABITS


def mlp(lr=0.1, **options):
    """[*, 4] -> [*, 2], and SGD. Other weights on each rank would be overwritten, so they are the same."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return net, torch.optim.SGD(net.parameters(), lr=lr, **options)


def wrapped(by, **options):
    """``mlp``, with the model to call."""
    net, optimizer = mlp(**options)
    return net, by.wrap(net, optimizer), optimizer


def square(net, x):
    """A loss."""
    return net(x).square().mean()


def step(by, model, optimizer, number, loss=square):
    """An ordinary training step."""
    optimizer.zero_grad()
    loss(model, by.batch(number)).backward()
    optimizer.step()


def train(by, model, optimizer, steps=3, loss=square):
    """Ordinary training steps: what a program does after the habit, and what must go on."""
    for number in range(steps):
        step(by, model, optimizer, 50 + number, loss)


def passes(by, net, optimizer, change, steps=4, zeros=None):
    """Trains with ``change(net)`` between the pass and the optimizer's step. ``zeros(number)``: whether gradients
    become zero before, not None."""
    model = by.wrap(net, optimizer)
    for number in range(steps):
        optimizer.zero_grad(set_to_none=zeros is None or not zeros(number))
        square(model, by.batch(number)).backward()
        change(net)
        optimizer.step()
    return state(net)


def state(net):
    """Copies of all gradients and weights."""
    return {"gradients": gradients(net), "weights": weights(net)}


def weights(net):
    """Copies of all parameters and buffers."""
    return [one.detach().clone() for one in [*net.parameters(), *net.buffers()]]


def gradients(net):
    """Copies of all gradients."""
    return [None if one.grad is None else one.grad.detach().clone() for one in net.parameters()]


class Plain:
    """The same training in one process, where torch's is no oracle: a loss is the mean of all ranks'."""

    def __init__(self, by, net, lr=0.1):
        self.net = copy.deepcopy(net)
        self.ranks = range(by.size)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=lr)

    def step(self, loss, number, between=lambda net: None, *shape, to_none=True):
        """``loss(net, batch)`` of each rank's batch of this number; ``between(net)`` before the optimizer's step."""
        self._optimizer.zero_grad(set_to_none=to_none)
        batches = [batch_of(rank, number, *shape) for rank in self.ranks]
        torch.stack([loss(self.net, batch) for batch in batches]).mean().backward()
        between(self.net)
        self._optimizer.step()

    def agrees(self, net):
        """Whether the replica has these weights, but for rounding."""
        pairs = zip(self.net.parameters(), net.parameters(), strict=True)
        return all(torch.allclose(one, other, 1e-4, 1e-6) for one, other in pairs)
