"""Programs whose steps are other calls than one of the whole model, in train mode, with one backward pass behind it."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass

import torch
from habits.case import Plain, habit, mlp, square, state, step, train, weights, wrapped
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bagua.base.errors import BaguaError

OURS = ("with_bagua", "our_ddp", "elastic", "local_sgd", "decentralized", "async")


def with_statistics():
    """A net with BatchNorm, and SGD."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def parameters(net):
    """Copies, without buffers: with_bagua lets those go their own way."""
    return [one.detach().clone() for one in net.parameters()]


@habit(kind=2)
def runs_two_forwards_with_batchnorm(by):
    """pytorch#175024: two forward passes of a model with BatchNorm before one backward pass."""
    net, optimizer = with_statistics()
    train(by, by.wrap(net, optimizer), optimizer, loss=lambda model, x: (model(x) - model(2 * x)).square().mean())
    return {"weights": parameters(net)}


@habit(kind=2)
def evaluates_between_forward_and_backward(by):
    """A pass in evaluation mode, with statistics, between a forward pass in training and its backward pass."""

    def loss(model, x):
        found = square(model, x)
        model.eval()
        with torch.no_grad():
            model(2 * x)
        model.train()
        return found

    net, optimizer = with_statistics()
    train(by, by.wrap(net, optimizer), optimizer, loss=loss)
    return {"weights": parameters(net)}


@habit(kind=2)
def samples_in_inference_mode(by):
    """Dropout stays on: a model in train mode under ``inference_mode``, before the first step and between others."""
    net, optimizer = with_statistics()
    model = by.wrap(net, optimizer, broadcast_buffers=True)
    for number in range(3):
        with torch.inference_mode():
            model(by.batch(20 + number))
        step(by, model, optimizer, number)
    return {"weights": parameters(net)}


@habit(kind=2)
def evaluates_on_one_rank(by):
    """Rank 0 alone evaluates, in evaluation mode and in train mode."""
    net, model, optimizer = wrapped(by)
    for number in range(4):
        step(by, model, optimizer, number)
        if by.rank == 0:
            with torch.no_grad():
                model(by.batch(70))
            model.eval()
            with torch.no_grad():
                model(by.batch(71))
            model.train()
    return {"weights": weights(net)}


@habit(kind=2)
def skips_backward_passes(by):
    """All ranks find a loss that they don't want, and go on with the next batch."""
    net, model, optimizer = wrapped(by)
    for number in range(7):
        optimizer.zero_grad()
        loss = model(by.batch(number)).square().mean()
        if number % 3 == 1:
            continue
        loss.backward()
        if number % 3 == 2:
            continue  # and a step of the optimizer that does not come
        optimizer.step()
    return state(net)


@habit(kind=2)
def begins_backward_with_a_gradient(by):
    """``output.backward(gradient)``, and torch.autograd.backward of two outputs."""
    net, model, optimizer = wrapped(by)
    for number in range(3):
        optimizer.zero_grad()
        out = model(by.batch(number))
        out.backward(torch.ones_like(out) / out.numel())
        first, second = model(by.batch(20 + number)).unbind(1)
        torch.autograd.backward([first.sum(), second.square().sum()])
        optimizer.step()
    return state(net)


@habit(kind=2)
def adds_the_norm_of_its_gradient(by):
    """A gradient with a graph is part of the loss: a second derivative of the weights."""
    net, optimizer = mlp()

    def loss(model, x):
        plain = square(model, x)
        slopes = torch.autograd.grad(plain, list(net.parameters()), create_graph=True)
        return plain + 0.1 * sum(one.square().sum() for one in slopes)

    train(by, by.wrap(net, optimizer), optimizer, loss=loss)
    return {"weights": weights(net)}


@dataclass
class Output:
    """As models of transformers give it."""

    loss: Tensor
    logits: dict[str, Tensor]


class GivesItsLoss(nn.Module):
    """Called by keywords; gives an object."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *, x):
        logits = self.net(x)
        return Output(logits.square().mean(), {"logits": logits})


@habit(kind=2)
def gives_its_loss(by):
    """Keywords in, an object out."""
    net, optimizer = mlp()
    train(by, by.wrap(GivesItsLoss(net), optimizer), optimizer, loss=lambda model, x: model(x=x).loss)
    return {"weights": weights(net)}


@habit(kind=2)
def computes_again_by_reentrant_checkpoints(by):
    """Backward passes inside the backward pass."""
    net, optimizer = mlp()

    class Recomputed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return checkpoint(net[2], checkpoint(net[:2], x.requires_grad_(), use_reentrant=True), use_reentrant=True)

    model = by.wrap(Recomputed(), optimizer)
    train(by, model, optimizer)
    return state(net)


@habit(kind=2)
def wraps_two_parts(by):
    """An encoder and a decoder, each wrapped, in one graph."""
    (first, of_first), (second, of_second) = mlp(), mlp()
    encoder, decoder = by.wrap(first, of_first), by.wrap(second, of_second)
    for number in range(3):
        of_first.zero_grad()
        of_second.zero_grad()
        code = encoder(by.batch(number))
        decoder(torch.cat([code, code], 1)).square().mean().backward()
        of_first.step()
        of_second.step()
    return {"weights": [*weights(first), *weights(second)]}


@habit(kind=2)
def wraps_again(by):
    """Thaws a layer in the middle, and wraps the model again, as fine-tuning does it."""
    net, optimizer = mlp(momentum=0.9)
    net[0].requires_grad_(False)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer)
    net[0].requires_grad_(True)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer)
    return state(net)


@habit(kind=2)
def runs_backward_in_a_thread(by):
    """The backward pass, and the next step, in threads that begin and end."""
    net, model, optimizer = wrapped(by)
    for number in range(3):
        thread = threading.Thread(target=step, args=(by, model, optimizer, number))
        thread.start()
        thread.join()
    train(by, model, optimizer)
    return {"weights": weights(net)}


# Training that torch's leaves to itself without a word


def trains_by(by, loss):
    """Whether training by this loss of ``net`` is training on all ranks' batches, or (where algorithms average weights)
    replicas stay near it."""
    net, optimizer = mlp()
    plain = Plain(by, net)
    by.wrap(net, optimizer)
    for number in range(12):
        optimizer.zero_grad()
        loss(net, by.batch(number)).backward()
        optimizer.step()
        plain.step(loss, number)
    if by.exact:
        return {"right": plain.agrees(net)}
    return {"near": all(torch.allclose(by.mean(one), one, 0.1, 0.1) for one in net.parameters())}


@habit(kind=2, oracle=False, only=OURS)
def uses_its_weights(by):
    """Functions of torch with the model's weights."""

    def loss(net, x):
        hidden = torch.tanh(nn.functional.linear(x, net[0].weight, net[0].bias))
        return nn.functional.linear(hidden, net[2].weight, net[2].bias).square().mean()

    return trains_by(by, loss)


@habit(kind=2, oracle=False, only=OURS)
def is_a_part_of_another(by):
    """A larger module that nobody wrapped calls the parts of the wrapped one."""
    return trains_by(by, lambda net, x: nn.Sequential(*net, nn.Tanh())(x).square().mean())


@habit(kind=2, oracle=False, only=OURS)
def keeps_its_graph(by):
    """Two backward passes through one graph: the sum of both counts."""

    net, optimizer = mlp()
    plain = Plain(by, net)
    model = by.wrap(net, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        found = square(model, by.batch(number))
        found.backward(retain_graph=True)
        (0.5 * found).backward()
        optimizer.step()
        plain.step(lambda net, x: 1.5 * square(net, x), number)
    return {"right": plain.agrees(net)} if by.exact else {}


NOT_EXCHANGED = ("with_bagua", "our_ddp", "elastic", "bytegrad")


def told_or_right(by, change, frozen=False):
    """Whether, after ``change(net, optimizer)``, the next steps have the same weights on all ranks, or an error with a
    code says on all of them, at once, that they can't. ``frozen``: the first layer is, before."""
    net, optimizer = mlp()
    net[0].requires_grad_(not frozen)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 3)
    told = False
    try:
        change(net, optimizer)
        train(by, model, optimizer, 2)
    except BaguaError as error:
        told = "[BG" in str(error)
    everyone = by.mean(torch.tensor(float(told))).item()
    same = everyone == 0 and all(torch.equal(by.mean(one), one) for one in net.parameters())
    return {"told or right": everyone == 1 or same}


when_not_exchanged = habit(kind=2, oracle=False, only=NOT_EXCHANGED)


def changed(change, **options):
    """A program that makes this change in the middle."""
    return when_not_exchanged(functools.wraps(change)(lambda by: told_or_right(by, change, **options)))


class Added(nn.Module):
    """A layer, and what came later."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.later = nn.ParameterList([torch.ones(1)])

    def forward(self, x):
        return self.layer(x) * torch.stack([*self.later]).sum()


@changed
def adds_a_parameter(net, optimizer):
    """A layer becomes one with a parameter more, which the optimizer gets."""
    net[2] = Added(net[2])
    optimizer.add_param_group({"params": net[2].later.parameters()})


@changed
def replaces_a_parameter(net, optimizer):
    """``layer.weight = nn.Parameter(...)``"""
    net[2].weight = nn.Parameter(net[2].weight.detach() * 0.9)
    optimizer.param_groups[0]["params"][2] = net[2].weight


@changed
def replaces_a_parameter_past_the_module(net, optimizer):
    """``layer._parameters["weight"] = ...``, which torch's hooks of registration don't see."""
    net[2]._parameters["weight"] = nn.Parameter(net[2].weight.detach() * 0.9)
    optimizer.param_groups[0]["params"][2] = net[2].weight


@changed
def overwrites_parameters(net, optimizer):
    """A change of dtype makes new parameters, where torch is told to: none of those that there were gets a gradient."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        net.double().float()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    optimizer.param_groups[0]["params"] = list(net.parameters())


@when_not_exchanged
def thaws_what_it_adds(by):
    """A new head is frozen for some steps."""

    def change(net, optimizer):
        torch.manual_seed(by.rank)
        net[2] = nn.Sequential(net[2], nn.Linear(2, 2).requires_grad_(False))
        optimizer.add_param_group({"params": net[2][1].parameters()})
        train(by, net, optimizer, 2)
        net[2][1].requires_grad_(True)

    return told_or_right(by, change)


@changed
def loads_by_assignment(net, optimizer):
    """``load_state_dict(assign=True)``: all parameters are new ones."""
    net.load_state_dict({name: one * 0.9 for name, one in net.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(net.parameters())


@functools.partial(changed, frozen=True)
def thaws_a_layer(net, optimizer):
    """A layer that was frozen when the model was wrapped."""
    net[0].requires_grad_(True)
