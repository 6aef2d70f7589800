"""Programs that move weights, or put other tensors in their place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from habits.case import Found, Plain, Way, gradients, habit, mlp, step, train, weights
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


def moves(by: Way, move: Any, steps: int = 6) -> Found:
    """Trains with ``move(net)`` after the third step."""
    net, optimizer = mlp(momentum=0.9)
    model = by.wrap(net, optimizer)
    for number in range(steps):
        step(by, model, optimizer, number)
        if number == 2:
            move(net)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def replaces_data_of_weights(by: Way) -> Found:
    """``p.data = p.data.clone()``"""

    def move(net: nn.Module) -> None:
        for one in net.parameters():
            one.data = one.data.clone() * 0.9

    return moves(by, move)


def square(net: Any, x: Tensor) -> Any:
    """A loss."""
    return net(x).square().mean()


def moves_as_in_one_process(
    by: Way, net: nn.Module, move: Any, when: Callable[[int], bool], *shape: int, to_none: bool = True
) -> Found:
    """Moves between a pass and its step, after which torch's loses gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plain = Plain(by, net)
    model = by.wrap(net, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch, about strides that cost time
        for number in range(6):
            between = move if when(number) else lambda net: None
            optimizer.zero_grad(set_to_none=to_none)
            square(model, by.batch(number, *shape)).backward()
            between(net)
            optimizer.step()
            plain.step(square, number, between, *shape, to_none=to_none)
    return {"right": plain.agrees(net)} if by.exact else {}


@habit(kind=1, oracle=False, without=("backend",))
def goes_to_double_and_back(by: Way) -> Found:
    """``net.double().float()``: gradients go with the weights, and are kept."""
    net, _ = mlp()
    return moves_as_in_one_process(by, net, lambda net: net.double().float(), lambda n: n % 2 == 1, to_none=False)


@habit(kind=1, oracle=False, without=("backend",))
def is_evaluated_in_half(by: Way) -> Found:
    """``net.bfloat16()`` for a pass without gradients, and back."""

    def move(net: nn.Module) -> None:
        state = copy.deepcopy(net.state_dict())
        with torch.no_grad():
            net.bfloat16()(torch.ones(2, 4, dtype=torch.bfloat16))
        net.float().load_state_dict(state)
        net.zero_grad()

    net, _ = mlp()
    return moves_as_in_one_process(by, net, move, lambda n: n % 2 == 1)


@habit(kind=1, oracle=False, without=("backend",))
def changes_memory_format(by: Way) -> Found:
    """``net.to(memory_format=torch.channels_last)`` between a pass and its step, and back in the next one but two."""

    def move(net: Any) -> None:
        last = net[0].weight.is_contiguous()
        net.to(memory_format=torch.channels_last if last else torch.contiguous_format)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return moves_as_in_one_process(by, net, move, lambda n: n in (1, 4), 2, 3, 8, 8, to_none=False)


@habit(kind=1, tolerance=1e-6)
def is_channels_last(by: Way) -> Found:
    """Weights, gradients and buffers of other strides from the start."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = by.wrap(net, optimizer, broadcast_buffers=False)
    for number in range(4):
        optimizer.zero_grad()
        model(by.batch(number, 2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    strides = [one.stride() for one in net.parameters()]
    return {"strides": strides, "weights": [one.detach().clone() for one in net.parameters()]}


@habit(kind=1)
def has_weights_of_all_strides(by: Way) -> Found:
    """Transposed weights, those with gaps, a scalar, an empty one."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transposed = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3).t())
            self.gaps = nn.Parameter(torch.linspace(-1, 1, 24).view(3, 8)[:, ::2])
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x: Any) -> Any:
            return x @ (self.transposed + self.gaps).t() * self.scalar + self.empty.sum()

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 4)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def has_weights_in_one_tensor(by: Way) -> Found:
    """A flat parameter whose parts are the layers' weights, from before the model is wrapped."""
    net, _ = mlp()
    flat = torch.cat([one.detach().flatten() for one in net.parameters()])
    torch.nn.utils.vector_to_parameters(flat, net.parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    for number in range(4):
        step(by, model, optimizer, number)
        flat.mul_(0.99)
    follows = torch.equal(flat, torch.nn.utils.parameters_to_vector(net.parameters()))
    return {"follows": follows, "weights": weights(net)}


@habit(kind=1)
def puts_weights_into_one_tensor(by: Way) -> Found:
    """The same after the model is wrapped, as searches along a line do it."""

    def move(net: nn.Module) -> None:
        vector = torch.nn.utils.parameters_to_vector(net.parameters())
        torch.nn.utils.vector_to_parameters(vector.detach() * 0.9, net.parameters())

    return moves(by, move)


@habit(kind=1)
def frees_memory_of_weights(by: Way) -> Found:
    """The storage of a weight is empty between two steps, as offloading makes it."""

    def move(net: nn.Module) -> None:
        for one in net.parameters():
            held = one.detach().clone()
            one.untyped_storage().resize_(0)
            one.untyped_storage().resize_(held.untyped_storage().nbytes())
            one.detach().copy_(held)

    return moves(by, move)


@habit(kind=1)
def swaps_tensors(by: Way) -> Found:
    """``torch.utils.swap_tensors``: the parameter is the same object, all of it is another's."""

    def move(net: nn.Module) -> None:
        for one in net.parameters():
            other = nn.Parameter(one.detach() * 0.9)
            other.grad = torch.ones_like(one)
            torch.utils.swap_tensors(one, other)

    net, optimizer = mlp()
    for number in range(2):
        step(by, net, optimizer, 0 * number)
    move(net)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def loads_weights(by: Way) -> Found:
    """load_state_dict in the middle, with gradients there and an optimizer's state."""

    def move(net: nn.Module) -> None:
        net.load_state_dict({name: one * 0.9 for name, one in net.state_dict().items()})

    return moves(by, move)


@habit(kind=1)
def ties_weights(by: Way) -> Found:
    """Two layers share a weight before the model is wrapped."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 4)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def ties_weights_later(by: Way) -> Found:
    """Two layers share a weight from some step on."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer, find_unused_parameters=True)
    train(by, model, optimizer, 2)
    net[2].weight = net[0].weight
    train(by, model, optimizer, 3)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def parametrizes_weights(by: Way) -> Found:
    """Weight normalisation and a parametrization of the program's own; both are taken away in the end."""

    class Doubled(nn.Module):
        def forward(self, x: Any) -> Any:
            return 2 * x

    net, _ = mlp()
    parametrizations.weight_norm(net[0])
    parametrize.register_parametrization(net[2], "weight", Doubled())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 4)
    trained = weights(net)
    parametrize.remove_parametrizations(net[0], "weight")
    parametrize.remove_parametrizations(net[2], "weight")
    with torch.no_grad():
        out = net(torch.ones(1, 4))
    return {"trained": trained, "out": out}


@habit(kind=1)
def prunes_weights(by: Way) -> Found:
    """A mask on weights and their gradients, in place, after each step."""
    net, optimizer = mlp(momentum=0.9)
    mask = net[0].weight.detach() > 0
    net[0].weight.register_hook(lambda gradient: gradient * mask)
    model = by.wrap(net, optimizer)
    for number in range(4):
        step(by, model, optimizer, number)
        net[0].weight.data.mul_(mask)
    return {"weights": weights(net)}


@habit(kind=1)
def trains_in_two_types(by: Way) -> Found:
    """Weights in bfloat16, and copies in float32 that the optimizer steps."""
    net, _ = mlp()
    net.bfloat16()
    masters = [one.detach().float().requires_grad_() for one in net.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    model = by.wrap(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for number in range(4):
        net.zero_grad()
        model(by.batch(number).bfloat16()).square().mean().backward()
        for master, one in zip(masters, net.parameters(), strict=True):
            master.grad = one.grad.float()  # type: ignore[union-attr]
        optimizer.step()
        for master, one in zip(masters, net.parameters(), strict=True):
            one.data = master.detach().bfloat16()
    return {"weights": weights(net)}


@habit(kind=1)
def mixes_types(by: Way) -> Found:
    """Parameters of three types in one model."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()

        def forward(self, x: Any) -> Any:
            return self.one(x) + self.two(x.double()).float() + self.three(x.bfloat16()).float()

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 4)
    return {"gradients": gradients(net), "weights": weights(net)}
