"""Programs whose optimizers, schedules and precision change while they train."""

import warnings

import torch
import torch.autograd.forward_ad as forward_ad
from habits.case import gradients, habit, mlp, step, train, weights
from torch import nn


@habit(kind=1, without=("local_sgd",))  # which refuses, in words, to exchange weights that no optimizer holds
def adds_a_group_later(by):
    """A head that no optimizer holds first, and that gets a group of its own with another rate."""
    net, _ = mlp()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer)
    optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
    train(by, model, optimizer)
    return {"weights": weights(net)}


@habit(kind=1, tolerance=1e-2)
def computes_in_bfloat16(by):
    """Autocast, and a clip by the norm of the averaged gradients."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(by.batch(number)).float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return {"weights": weights(net)}


@habit(kind=1)
def trains_models_in_changing_order(by):
    """Three models, of which each step takes two, in another order each time, the same on all ranks."""
    nets = [mlp() for _ in range(3)]
    models = [by.wrap(net, optimizer) for net, optimizer in nets]
    for number in range(6):
        for index in ((number + 1) % 3, number % 3):
            step(by, models[index], nets[index][1], number)
    return {"weights": [weights(net) for net, _ in nets]}


@habit(kind=2)
def differentiates_forward(by):
    """A penalty on a directional derivative, in forward mode, beside the loss."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        batch = by.batch(number)
        with warnings.catch_warnings(), forward_ad.dual_level():
            warnings.simplefilter("ignore")  # of torch, about its own decompositions
            dual = net(forward_ad.make_dual(batch, torch.ones_like(batch)))
            tangent = forward_ad.unpack_dual(dual).tangent
        assert tangent is not None
        (model(batch).square().mean() + float(tangent.detach().square().mean()) * 0).backward()
        optimizer.step()
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def frees_models(by):
    """Models are wrapped, trained and dropped, one after the other."""
    found = []
    for _ in range(4):
        net, optimizer = mlp()
        model = by.wrap(net, optimizer)
        train(by, model, optimizer, 2)
        found.append(weights(net))
        del model, net, optimizer
    return {"weights": found}


@habit(kind=2)
def runs_forward_alone(by):
    """A thousand forward passes in training mode, of which few are followed by a backward pass."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(1000):
        loss = model(by.batch(number % 7)).square().mean()
        if number % 250 == 0:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"weights": weights(net)}
