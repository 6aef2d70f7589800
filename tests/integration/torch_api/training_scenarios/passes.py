"""Backward passes that are not one plain pass per step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm
from training_scenarios.support import (
    batch,
    check_close,
    check_close_parameters,
    check_identical,
    compare,
    mlp,
    scenario,
    seeded,
    sgd,
    square,
    warnings_ignored,
    wrap,
)


@scenario
def accumulation() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for synced in ([False, False, True], [True, True, True], [True, False, True]):
        for average in (True, False):
            for set_to_none in (True, False):
                reference, model = seeded(mlp), seeded(mlp)
                optimizers = sgd(reference), sgd(model)
                wrap(model, optimizers[1], average=average)
                for step in range(3):
                    for optimizer in optimizers:
                        optimizer.zero_grad(set_to_none)
                    for part, sync in enumerate(synced):
                        for other in range(n):
                            (square(reference, other, 10 * step + part) / (n if average else 1)).backward()
                        with contextlib.nullcontext() if sync else model.bagua_ddp.no_sync():
                            square(model, rank, 10 * step + part).backward()
                    for optimizer in optimizers:
                        optimizer.step()
                check_close(model, reference)
                check_identical(model)


@scenario
def several_passes() -> None:
    def double(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 6, 10)
        return model(x).square().mean() + model(x * 0.5).abs().mean()

    compare(mlp, double)

    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp)
    optimizers = sgd(reference), sgd(model)
    wrap(model, optimizers[1])
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        total = sum(square(reference, other, step) for other in range(n)) / n
        mine = square(model, rank, step)
        for loss in (total, mine):
            loss.backward(retain_graph=True)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    check_close(model, reference)

    # Derivatives that accumulate nothing leave everything as it is, also between backward and step.
    for average in (True, False):
        model = wrap(seeded(mlp), average=average)
        square(model, rank, 0).backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        torch.autograd.grad(square(model, rank, 1), list(model.parameters()))
        if rank == 0:
            x = batch(rank, 2, 6, 10).requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
        for parameter, gradient in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter.grad, gradient)

    def penalty(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 6, 10).requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return gradient.square().mean() + square(model, rank, step)

    compare(mlp, penalty)


@scenario
def create_graph() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for flat in (True, False):
        reference, model = seeded(mlp), wrap(seeded(mlp), do_flatten=flat)
        with warnings_ignored():
            (sum(square(reference, other, 0) for other in range(n)) / n).backward(create_graph=True)
            square(model, rank, 0).backward(create_graph=True)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.detach(), other.grad.detach(), rtol=1e-4, atol=1e-6)
        reference.zero_grad()


@scenario
def mixed_precision() -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(model, rank, step)

    compare(mlp, loss, tolerance=0.02)

    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp)
    optimizers = sgd(reference), sgd(model)
    wrap(model, optimizers[1])
    scalers = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu")
    for step in range(4):
        losses = sum(square(reference, other, step) for other in range(n)) / n, square(model, rank, step)
        if step == 2 and rank == 0:  # an overflow on one rank makes all skip the step
            losses = losses[0], losses[1] * float("inf")
        for optimizer, scaler, value in zip(optimizers, scalers, losses, strict=True):
            optimizer.zero_grad()
            scaler.scale(value).backward()
            scaler.unscale_(optimizer)
            if step != 2 or optimizer is optimizers[1]:
                scaler.step(optimizer)
            scaler.update(None if step != 2 else 32768.0)
    check_close_parameters(model, reference)
    check_identical(model)


@scenario
def checkpointing() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool, shared: bool) -> None:
            super().__init__()
            self.first = nn.Linear(10, 10)
            self.second = nn.Linear(10, 10)
            self.last = nn.Linear(10, 10)
            self.reentrant = reentrant
            self.shared = shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for layer in (self.first, self.second, *([self.first, self.last] if self.shared else [self.last])):
                x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=self.reentrant)
            return x

    for reentrant in (False, True):
        for shared in (False, True):
            compare(lambda r=reentrant, s=shared: Checkpointed(r, s))
            compare(lambda r=reentrant, s=shared: Checkpointed(r, s), average=False, set_to_none=False)

    class Inside(nn.Module):
        """Checkpointed as a whole, called twice: two nested passes."""

        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    def whole(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        x = batch(rank, step, 6, 10).requires_grad_()
        once = checkpoint(model, x, use_reentrant=True)
        return (once + checkpoint(model, x * 2, use_reentrant=True)).square().mean()

    compare(Inside, whole)


@scenario
def two_models_in_one_pass() -> None:
    """As in adversarial training: gradients of both come in one backward pass, and not in the same order everywhere."""
    rank, n = bagua.get_rank(), bagua.get_world_size()

    def make() -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(0)
        return nn.Linear(10, 10), mlp()

    def loss(models: tuple[nn.Module, nn.Module], other: int) -> torch.Tensor:
        x = batch(other, 0, 6, 10)
        parts = [models[1](models[0](x)).square().mean(), models[0](x).abs().mean()]
        return parts[0] + parts[1] if other % 2 else parts[1] + parts[0]

    reference, models = make(), make()
    for model in models:
        wrap(model)
    (sum(loss(reference, other) for other in range(n)) / n).backward()
    loss(models, rank).backward()
    for model, other in zip(models, reference, strict=True):
        check_close(model, other)


@scenario
def one_rank_in_evaluation_mode() -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        model.train(rank != 0)
        return square(model, rank, step)

    compare(mlp, loss)
    model = wrap(seeded(mlp))
    if bagua.get_rank() == 0:
        model.eval()
        with torch.no_grad():
            square(model, 0, 0)
    model.train()
    square(model, bagua.get_rank(), 0).backward()


@scenario
def exception_in_backward() -> None:
    """Caught before anything was exchanged, it leaves no trace."""

    def fail(gradient: torch.Tensor) -> None:
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
def compiled() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp, seed=rank)
    optimizers = sgd(reference), sgd(model)
    wrap(model, optimizers[1])
    with warnings_ignored():
        fast = torch.compile(model, backend="aot_eager")
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (sum(square(reference, other, step) for other in range(n)) / n).backward()
            square(fast, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    check_close(model, reference)


@scenario
def compiled_weights() -> None:
    """Algorithms that act in forward passes do so in compiled models, too."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    batches = [batch(other, 1, 6, 10) for other in range(n)]
    for compiled_in_place in (True, False):
        reference, model = seeded(mlp), seeded(mlp)
        model.with_bagua([], DecentralizedAlgorithm())
        with torch.no_grad():
            model[0].bias.add_(rank)
            reference[0].bias.add_((n - 1) / 2)
        with warnings_ignored():
            if compiled_in_place:
                model.compile(backend="aot_eager")
                loss = model(batches[rank]).square().mean()
            else:
                loss = torch.compile(lambda x, one=model: one(x).square().mean(), backend="aot_eager")(batches[rank])
            loss.backward()
        torch.testing.assert_close(model[0].bias, reference[0].bias)
        assert model.bagua_ddp.bagua_train_step_counter == 1
