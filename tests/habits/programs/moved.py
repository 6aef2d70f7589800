"""Programs that move weights, or put other tensors in their place."""

import warnings

import torch
from habits.case import Plain, habit, mlp, square, state, step, train, weights, wrapped
from torch import nn
from torch.nn.utils import parametrizations, parametrize


def moves(by, move, steps=6):
    """Trains with ``move(net)`` after the third step."""
    net, model, optimizer = wrapped(by, momentum=0.9)
    for number in range(steps):
        step(by, model, optimizer, number)
        if number == 2:
            move(net)
    return state(net)


def moves_as_in_one_process(by, net, move, when, *shape, to_none=True):
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
def goes_to_double_and_back(by):
    """``net.double().float()``: gradients go with the weights, and are kept."""
    net, _ = mlp()
    return moves_as_in_one_process(by, net, lambda net: net.double().float(), lambda n: n % 2 == 1, to_none=False)


@habit(kind=1, oracle=False, without=("backend",))
def changes_memory_format(by):
    """``net.to(memory_format=torch.channels_last)`` between a pass and its step, and back in the next one but two."""

    def move(net):
        last = net[0].weight.is_contiguous()
        net.to(memory_format=torch.channels_last if last else torch.contiguous_format)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    return moves_as_in_one_process(by, net, move, lambda n: n in (1, 4), 2, 3, 8, 8, to_none=False)


@habit(kind=1)
def has_weights_of_all_strides(by):
    """Transposed weights, those with gaps, a scalar, an empty one."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.transposed = nn.Parameter(torch.linspace(-1, 1, 12).view(4, 3).t())
            self.gaps = nn.Parameter(torch.linspace(-1, 1, 24).view(3, 8)[:, ::2])
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.empty = nn.Parameter(torch.zeros(0, 4))

        def forward(self, x):
            return x @ (self.transposed + self.gaps).t() * self.scalar + self.empty.sum()

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(by, by.wrap(net, optimizer), optimizer, 4)
    return state(net)


@habit(kind=1)
def has_weights_in_one_tensor(by):
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
def puts_weights_into_one_tensor(by):
    """The same after the model is wrapped, as searches along a line do it."""

    def move(net):
        vector = torch.nn.utils.parameters_to_vector(net.parameters())
        torch.nn.utils.vector_to_parameters(vector.detach() * 0.9, net.parameters())

    return moves(by, move)


@habit(kind=1)
def frees_memory_of_weights(by):
    """The storage of a weight is empty between two steps, as offloading makes it."""

    def move(net):
        for one in net.parameters():
            held = one.detach().clone()
            one.untyped_storage().resize_(0)
            one.untyped_storage().resize_(held.untyped_storage().nbytes())
            one.detach().copy_(held)

    return moves(by, move)


def two_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@habit(kind=1)
def ties_weights(by):
    """Two layers share a weight before the model is wrapped."""
    net, _ = two_layers()
    net[2].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(by, by.wrap(net, optimizer), optimizer, 4)
    return state(net)


@habit(kind=1)
def ties_weights_later(by):
    """Two layers share a weight from some step on."""
    net, optimizer = two_layers()
    model = by.wrap(net, optimizer, find_unused_parameters=True)
    train(by, model, optimizer, 2)
    net[2].weight = net[0].weight
    train(by, model, optimizer, 3)
    return state(net)


@habit(kind=1)
def parametrizes_weights(by):
    """Weight normalisation and a parametrization of the program's own; both are taken away in the end."""

    class Doubled(nn.Module):
        def forward(self, x):
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
def trains_in_two_types(by):
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
            master.grad = one.grad.float()
        optimizer.step()
        for master, one in zip(masters, net.parameters(), strict=True):
            one.data = master.detach().bfloat16()
    return {"weights": weights(net)}


@habit(kind=1)
def mixes_types(by):
    """Parameters of three types in one model."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.one, self.two, self.three = nn.Linear(4, 4), nn.Linear(4, 4).double(), nn.Linear(4, 4).bfloat16()

        def forward(self, x):
            return self.one(x) + self.two(x.double()).float() + self.three(x.bfloat16()).float()

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train(by, by.wrap(net, optimizer), optimizer, 4)
    return state(net)
