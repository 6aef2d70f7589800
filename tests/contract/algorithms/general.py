"""Checks that every algorithm must pass: run on ranks for all registered names, and for an algorithm of
a user's own (``pytest tests/contract --algorithm my.module:MyAlgorithm``).

Each check runs in every rank with a ``Subject``; it raises if something is wrong. Bad input is in mistakes.py.
"""

import os

import torch
from contract.algorithms.case import batch, flat, mlp, replica, seeded, square
from contract.algorithms.exchange import everyones
from contract.algorithms.subjects import CLEAR, Subject
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.base.replica_check import VARIABLE

CHECKS = {}


def check(function):
    """Registers a check that every algorithm must pass."""
    CHECKS[function.__name__] = function
    return function


def identical(model):
    """Whether all ranks hold the same bits."""
    everyone = everyones(flat(model).view(torch.uint8))
    return bool((everyone == everyone[0]).all())


def take_steps(model, optimizers, steps, loss=square, subject=None):
    """Trains, and returns the losses. With a subject, its replicas must be equal afterwards."""
    found = []
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = loss(model, bagua.get_island(), step)
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(value.item())
    assert bool(flat(model).isfinite().all()), "parameters are not finite"
    if subject is not None and subject.replicas_equal:
        assert identical(model), "replicas differ"
    return found


def wrap(subject, make=mlp, **options):
    """A model that is different on every rank until it is wrapped."""
    model = replica(make)
    optimizers = subject.optimizers(model)
    os.environ[VARIABLE] = "error" if subject.replicas_equal else "warn"
    return model.with_bagua(optimizers, subject.make(), **options), optimizers


def unwrap(model):
    """The model is an ordinary one again, and what it held goes back."""
    model.bagua_ddp.close()


def fixed(model, rank, step):
    """The same batch in every step: what is learned shows."""
    return square(model, rank, 0)


def the_same_everywhere(text):
    """Whether all ranks pass the same text (its beginning)."""
    everyone = everyones(torch.tensor(list(text.encode()[:64].ljust(64)), dtype=torch.uint8))
    return bool((everyone == everyone[0]).all())


@check
def trains(subject):
    """The loss falls."""
    model, optimizers = wrap(subject)
    losses = take_steps(model, optimizers, 30, fixed, subject)
    assert min(losses[-10:]) < 0.7 * losses[0], losses  # outer momentum swings
    unwrap(model)


@check
def begins_with_parameters_of_rank_0(subject):
    """Every replica is rank 0's as soon as it is wrapped."""
    model, _ = wrap(subject)
    assert identical(model)
    assert torch.equal(flat(model), flat(seeded(mlp, seed=0)))
    unwrap(model)


class Branches(nn.Module):
    """Rank r uses branch r modulo 2; branch 2 is used by none."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x, number):
        found = self.branches[number](x) * self.scale
        return found


@check
def parameters_without_gradient(subject):
    """Ranks that use different parts of the model do not wait for each other, and parts used by none stay."""
    model, optimizers = wrap(subject, Branches)
    before = flat(model.branches[2])

    def loss(one, rank, step):
        found = one(batch(rank, step, 4, 10), (rank + step) % 2).square().mean()
        return found

    take_steps(model, optimizers, 4, loss, subject)
    assert bool(flat(model.branches[2]).isfinite().all()) and len(before)
    unwrap(model)


@check
def accumulation_without_synchronisation(subject):
    """Passes under ``no_sync`` add up, and the next one exchanges the whole."""
    model, optimizers = wrap(subject)
    rank = bagua.get_island()
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.bagua_ddp.no_sync():
            square(model, rank, 2 * step).backward()
        square(model, rank, 2 * step + 1).backward()
        for optimizer in optimizers:
            optimizer.step()
    if subject.replicas_equal:
        assert identical(model)
    take_steps(model, optimizers, 2, subject=subject)
    unwrap(model)


@check
def two_passes_before_a_step(subject):
    """Gradient accumulation by two synchronised passes works, or is refused clearly on every rank."""
    model, optimizers = wrap(subject)
    message = ""
    try:
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in range(2):
                square(model, bagua.get_island(), 2 * step + part).backward()
            for optimizer in optimizers:
                optimizer.step()
    except CLEAR as error:
        message = str(error)
    assert the_same_everywhere(message), message
    if not message and subject.replicas_equal:
        assert identical(model)
    unwrap(model)


@check
def switching(subject):
    """To gradient all-reduce and back, on a live model, twice."""
    model, optimizers = wrap(subject)
    take_steps(model, optimizers, 3, subject=subject)
    plain = Subject("gradient_allreduce", GradientAllReduceAlgorithm)
    for _ in range(2):
        model.with_bagua(optimizers, GradientAllReduceAlgorithm())
        assert identical(model), "the parameters of rank 0 were not taken over"
        take_steps(model, optimizers, 2, subject=plain)
        model.with_bagua(optimizers, subject.make())
        take_steps(model, optimizers, 3, subject=subject)
    unwrap(model)
    losses = take_steps(model, optimizers, 1)  # an ordinary model again
    assert losses


@check
def reset_between_steps(subject):
    """Tensors, buckets and plans are made again when the algorithm asks for it."""
    model, optimizers = wrap(subject)
    take_steps(model, optimizers, 2, subject=subject)
    implementation = model.bagua_algorithm
    kept = implementation.need_reset
    asked = iter([True])
    implementation.need_reset = lambda: next(asked, False) or kept()
    take_steps(model, optimizers, 4, subject=subject)
    unwrap(model)


class Mixed(nn.Module):
    """Layers of two dtypes, a scalar parameter, a shared one, running statistics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 12, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 12)
        self.third = nn.Linear(12, 12)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        hidden = self.norm(self.first(x.double()).float())
        found = self.third(torch.tanh(self.second(hidden))) * self.scale
        return found


@check
def several_dtypes(subject):
    """float64 beside float32, shared and scalar parameters, small buckets, memory of their own."""
    for options in ({}, {"do_flatten": False}):
        try:
            model, optimizers = wrap(subject, Mixed, **options)
        except CLEAR as error:
            assert the_same_everywhere(str(error)), error
            continue
        take_steps(model, optimizers, 3, subject=subject)
        unwrap(model)
