"""Backward passes that are not one plain pass per step."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from training_scenarios.support import (
    batch,
    check_close,
    compare,
    mlp,
    scenario,
    seeded,
    square,
    warnings_ignored,
    wrap,
)


@scenario
def accumulation():
    for synced in ([False, False, True], [True, True, True], [True, False, True]):
        for average, set_to_none in itertools.product((True, False), repeat=2):
            compare(mlp, synced=synced, steps=3, average=average, set_to_none=set_to_none)


@scenario
def several_passes():
    def penalty(model, rank, step):
        x = batch(rank, step, 6, 10).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean() + square(model, rank, step) + model(x * 0.5).abs().mean()

    compare(mlp, penalty)

    # A graph that is used twice; and derivatives that accumulate nothing leave everything as it is.
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for average in (True, False):
        reference, model = seeded(mlp), wrap(seeded(mlp), average=average)
        for _ in range(2):
            total = sum(square(reference, other, 0) for other in range(n)) / (n if average else 1)
            for loss in (total, square(model, rank, 0)):
                loss.backward(retain_graph=True)
                loss.backward()
        check_close(model, reference)
        before = [parameter.grad.clone() for parameter in model.parameters()]
        torch.autograd.grad(square(model, rank, 1), list(model.parameters()))
        if rank == 0:
            x = batch(rank, 2, 6, 10).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)


class Checkpointed(nn.Module):
    """Computes layers again in backward, the first one of them twice."""

    def __init__(self, reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for number in (0, 1, 0, 2):
            x = checkpoint(lambda y, layer=self.layers[number]: torch.tanh(layer(y)), x, use_reentrant=self.reentrant)
        return x


@scenario
def checkpointing():
    for reentrant in (False, True):
        compare(lambda r=reentrant: Checkpointed(r))
        compare(lambda r=reentrant: Checkpointed(r), average=False, set_to_none=False)

    def whole(model, rank, step):
        """Checkpointed as a whole, called twice: two nested passes."""
        x = batch(rank, step, 6, 10).requires_grad_()
        once = checkpoint(model, x, use_reentrant=True)
        return (once + checkpoint(model, x * 2, use_reentrant=True)).square().mean()

    compare(mlp, whole)


@scenario
def exception_in_backward():
    """Caught before anything was exchanged, it leaves no trace."""

    def fail(gradient):
        raise ArithmeticError("on purpose")

    rank, n = bagua.get_rank(), bagua.get_world_size()
    for whole in (True, False):
        reference, model = seeded(mlp), wrap(seeded(mlp))
        output = model(batch(rank, 0, 6, 10))
        output.register_hook(fail)  # comes after ours, by which the pass has begun
        with pytest.raises(ArithmeticError):
            output.sum().backward()
        (sum(square(reference, other, 1) for other in range(n)) / n).backward()
        if whole:
            square(model, rank, 1).backward()
        else:  # past the hooks of the model as a whole: its parameters alone tell that a pass begins
            x = batch(rank, 1, 6, 10)
            for layer in model:
                x = layer(x)
            x.square().mean().backward()
        check_close(model, reference)


@scenario
def compiled():
    """An algorithm that acts in forward passes. habits/programs has another one."""
    with warnings_ignored():
        rank, n = bagua.get_rank(), bagua.get_world_size()
        reference, model = seeded(mlp), seeded(mlp).with_bagua([], DecentralizedAlgorithm())
        with torch.no_grad():
            model[0].bias.add_(rank)
            reference[0].bias.add_((n - 1) / 2)
        fast = torch.compile(lambda x: model(x).square().mean(), backend="aot_eager")
        fast(batch(rank, 1, 6, 10)).backward()
    torch.testing.assert_close(model[0].bias, reference[0].bias)
    assert model.bagua_ddp.bagua_train_step_counter == 1
