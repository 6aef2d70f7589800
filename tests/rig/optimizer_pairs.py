"""Pairs of a plain optimizer and a fused one over the same parameters, which take the same steps."""

from collections.abc import Callable
from typing import Any

import torch

from bagua.torch_api.contrib import fuse_optimizer

Make = Callable[[list[Any]], Any]

# Several of one size and of few; one alone; one above the bound; sizes beside those of vectors.
SHAPES = [
    (7,),
    (33,),
    (10, 10),
    (7,),
    (33,),
    (5, 20),
    (3, 11),
    (1,),
    (1, 1),
    (64,),
    (8, 8),
    (2, 3, 4),
    (40_000,),
    (13,),
]


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step, some, keep=False, lacking=False):
    """``keep``: as with set_to_none=False. ``lacking``: in each step some parameters have none."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(some):
        found = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if not parameter.requires_grad or (lacking and (number + step) % 5 == 0):
            parameter.grad = None
        elif keep and parameter.grad is not None:
            parameter.grad.copy_(found)
        else:
            parameter.grad = found


def differences(plain, fused):
    """Of parameters and state."""
    found = []
    for one, other in zip(members(plain), members(fused), strict=True):
        if not torch.equal(one, other):
            found.append(f"parameter {list(one.shape)}")
        state, others = plain.state[one], fused.state[other]
        if state.keys() != others.keys():
            found.append(f"{state.keys()} {others.keys()}")
        for name, value in state.items():
            same = torch.equal(value, others[name]) if isinstance(value, torch.Tensor) else value == others[name]
            if not same:
                found.append(f"{name} of {list(one.shape)}")
    return found


def members(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def pair(make, dtype=torch.float32, **settings):
    """A plain optimizer and a fused one, with two groups each, on equal parameters."""
    made = []
    for _ in range(2):
        some = parameters(dtype)
        some[3].requires_grad = False
        made.append(make([{"params": some[:9]}, {"params": some[9:] + parameters(dtype)[:7], "lr": 0.02}]))
    return made[0], fuse_optimizer(made[1], **settings)


def train(plain, fused, steps=6, first=0, **settings):
    for step in range(first, first + steps):
        gradients(step, members(plain), **settings)
        gradients(step, members(fused), **settings)
        plain.step()
        fused.fuse_step()
        assert differences(plain, fused) == [], f"step {step}"


def adam(groups):
    return torch.optim.Adam(groups, lr=0.01)
