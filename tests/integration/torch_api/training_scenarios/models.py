"""Kinds of models and optimizers."""

import torch
from torch import nn
from torch.nn import functional

import bagua.torch_api as bagua
from training_scenarios.support import batch, compare, mlp, scenario, seeded, sgd, square, wide_mlp, wide_square, wrap


@scenario
def plain():
    def clip(model):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    compare(wide_mlp, wide_square, steps=50, tolerance=1e-9)
    compare(mlp, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    for options in ({}, {"do_flatten": False}, {"average": False}, {"between": clip}):
        compare(mlp, set_to_none=False, **options)
    compare(lambda: nn.Linear(10, 3), average=False)  # parameters of the root
    nothing = nn.Tanh()
    wrap(nothing)
    nothing(batch(0, 0, 3).requires_grad_()).sum().backward()


@scenario
def convolution_with_batchnorm():
    def make():
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))

    def loss(model, rank, step):
        return functional.cross_entropy(model(batch(rank, step, 4, 3, 8, 8)), torch.tensor([0, 1, 2, 3]))

    compare(lambda: make().to(memory_format=torch.channels_last), loss)
    # Buffers are rank 0's at the start.
    model = make()
    for tensor in (model[1].running_mean, model[1].running_var, model[1].num_batches_tracked):
        tensor.fill_(bagua.get_rank() + 5)
    wrap(model)
    assert model[1].num_batches_tracked.item() == 5 and model[1].running_mean.tolist() == [5.0] * 8


class Branches(nn.Module):
    """Uses only the branches whose numbers it is told."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))
        self.head = nn.Linear(10, 2)

    def forward(self, x, used):
        for number in used:
            x = torch.tanh(self.branches[number](x))
        return self.head(x)


@scenario
def parameters_without_gradient():
    def some_steps(model, rank, step):
        return model(batch(rank, step, 6, 10), [step % 4]).square().mean()

    def some_ranks(model, rank, step):
        return model(batch(rank, step, 6, 10), [rank % 3] if step % 2 else [rank % 2, 2]).square().mean()

    for loss in (some_steps, some_ranks):
        compare(Branches, loss, steps=6)
        compare(Branches, loss, set_to_none=False, average=False, steps=6)
        compare(Branches, loss, do_flatten=False, steps=6)


@scenario
def frozen_and_ignored_parameters():
    def make():
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    assert compare(make).bagua_ddp.bagua_build_params()[0][0] == "0.bias"
    for names in (["0.weight", "4.bias"], [".0.weight", ".4.bias"]):
        model = seeded(mlp, seed=bagua.get_rank())
        before = model[4].bias.detach().clone()
        model._bagua_params_and_buffers_to_ignore = names
        wrap(model, sgd(model))
        assert torch.equal(model[4].bias, before)
        square(model, bagua.get_rank(), 0).backward()
        alone = seeded(mlp)
        with torch.no_grad():
            for mine, other in zip(alone.parameters(), model.parameters(), strict=True):
                mine.copy_(other)
        square(alone, bagua.get_rank(), 0).backward()
        torch.testing.assert_close(model[4].bias.grad, alone[4].bias.grad)
        assert not torch.allclose(model[0].bias.grad, alone[0].bias.grad) or bagua.get_world_size() == 1
