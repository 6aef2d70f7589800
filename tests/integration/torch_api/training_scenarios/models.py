"""Kinds of models and optimizers."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import bagua.torch_api as bagua
from training_scenarios.support import (
    batch,
    compare,
    mlp,
    scenario,
    seeded,
    sgd,
    square,
    wide_mlp,
    wide_square,
    wrap,
)


@scenario
def plain() -> None:
    compare(wide_mlp, wide_square, steps=50, tolerance=1e-9)


@scenario
def gradients_zeroed_in_place() -> None:
    compare(mlp, set_to_none=False)


@scenario
def gradients_in_memory_of_their_own() -> None:
    compare(mlp, do_flatten=False)
    compare(mlp, do_flatten=False, set_to_none=False)


@scenario
def adam() -> None:
    compare(mlp, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))


@scenario
def sum_of_gradients() -> None:
    compare(mlp, average=False)
    compare(mlp, average=False, set_to_none=False)


@scenario
def root_parameters() -> None:
    compare(lambda: nn.Linear(10, 3))
    nothing = nn.Tanh()
    wrap(nothing)
    nothing(batch(0, 0, 3).requires_grad_()).sum().backward()

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cls = nn.Parameter(torch.randn(1, 1, 10))
            self.body = nn.Linear(10, 10)
            self.position = nn.Parameter(torch.randn(7, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(torch.cat([self.cls.expand(1, -1, -1), x.unsqueeze(0)], 1) + self.position)

    compare(Vit)


@scenario
def convolution_with_batchnorm() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return functional.cross_entropy(model(batch(rank, step, 4, 3, 8, 8)), torch.tensor([0, 1, 2, 3]))

    compare(make, loss)
    compare(lambda: make().to(memory_format=torch.channels_last), loss)
    # Buffers are rank 0's at the start.
    model = make()
    for tensor in (model[1].running_mean, model[1].running_var, model[1].num_batches_tracked):
        tensor.fill_(bagua.get_rank() + 5)
    wrap(model)
    assert model[1].num_batches_tracked.item() == 5 and model[1].running_mean.tolist() == [5.0] * 8


class Branches(nn.Module):
    """Uses only the branches whose numbers it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.head = nn.Linear(10, 2)

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for number in used:
            x = torch.tanh(self.branches[number](x))
        return self.head(x)


@scenario
def parameters_without_gradient() -> None:
    def some_steps(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 6, 10), [step % 4]).square().mean()

    def some_ranks(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(batch(rank, step, 6, 10), [rank % 3] if step % 2 else [rank % 2, 2]).square().mean()

    for loss in (some_steps, some_ranks):
        for set_to_none in (True, False):
            for average in (True, False):
                compare(Branches, loss, set_to_none=set_to_none, average=average, steps=6)
        compare(Branches, loss, do_flatten=False, steps=6)


@scenario
def frozen_and_ignored_parameters() -> None:
    def make() -> nn.Module:
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    model = compare(make)
    assert model.bagua_ddp.bagua_build_params()[0][0] == "0.bias"

    for names in (["0.weight", "4.bias"], [".0.weight", ".4.bias"]):
        model = seeded(mlp, seed=bagua.get_rank())
        before = model[4].bias.detach().clone()
        model._bagua_params_and_buffers_to_ignore = names
        wrap(model, sgd(model))
        assert torch.equal(model[4].bias, before)
        square(model, bagua.get_rank(), 0).backward()
        alone = seeded(mlp, seed=bagua.get_rank())
        with torch.no_grad():
            for mine, other in zip(alone.parameters(), model.parameters(), strict=True):
                mine.copy_(other)
        square(alone, bagua.get_rank(), 0).backward()
        torch.testing.assert_close(model[4].bias.grad, alone[4].bias.grad)
        assert not torch.allclose(model[0].bias.grad, alone[0].bias.grad) or bagua.get_world_size() == 1


@scenario
def tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 10)
            self.body = nn.Linear(10, 10)
            self.head = nn.Linear(10, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.tanh(self.body(self.embed(x))))

    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        tokens = torch.randint(0, 20, (6,), generator=torch.Generator().manual_seed(10 * step + rank))
        return functional.cross_entropy(model(tokens), tokens.roll(1))

    compare(Tied, loss)


@scenario
def mixed_dtypes() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(10, 16, dtype=torch.float64)
            self.b = nn.Linear(16, 16)
            self.c = nn.Linear(16, 16, dtype=torch.bfloat16)
            self.d = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.b(torch.tanh(self.a(x.double())).float()))
            return self.d(torch.tanh(self.c(x.bfloat16())).float())

    model = compare(Mixed, tolerance=0.05)
    for bucket in model.bagua_buckets:
        assert len({tensor.dtype for tensor in bucket.tensors}) == 1


@scenario
def clipping() -> None:
    def clip(model: nn.Module) -> object:
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    compare(mlp, between=clip)
    compare(mlp, between=clip, set_to_none=False)
