"""Programs whose optimizers, schedules and precision change while they train."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from habits.case import Found, Way, gradients, habit, mlp, step, train, weights
from torch import Tensor, nn
from torch.func import functional_call


@habit(kind=1)
def schedules_its_rate(by: Way) -> Found:
    """A warm-up, and then a schedule that looks at the loss."""
    net, optimizer = mlp(momentum=0.9)
    model = by.wrap(net, optimizer)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    rates = []
    for number in range(6):
        step(by, model, optimizer, number)
        if number < 3:
            warm_up.step()
        else:
            plateau.step(float(by.mean(torch.tensor(1.0 + number))))
        rates.append(optimizer.param_groups[0]["lr"])
    return {"rates": rates, "weights": weights(net)}


@habit(kind=1)
def goes_back_to_an_earlier_state(by: Way) -> Found:
    """Model and optimizer are loaded in the middle of training, as after a loss that exploded."""
    net, _ = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    train(by, model, optimizer)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(by, model, optimizer)
    return {"weights": weights(net), "step": optimizer.state[next(net.parameters())]["step"]}


@habit(kind=1, without=("local_sgd",))  # which refuses, in words, to exchange weights that no optimizer holds
def adds_a_group_later(by: Way) -> Found:
    """A head that no optimizer holds first, and that gets a group of its own with another rate."""
    net, _ = mlp()
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer)
    optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.01})
    train(by, model, optimizer)
    return {"weights": weights(net)}


@habit(kind=1, tolerance=1e-2)
def computes_in_bfloat16(by: Way) -> Found:
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


@habit(kind=1, tolerance=1e-2, without=("bytegrad",))
def trains_in_half_precision(by: Way) -> Found:
    """float16 weights, a master copy in float32, and a scaled loss."""
    net, _ = mlp()
    net.half()
    master = [one.detach().float() for one in net.parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    for number in range(4):
        optimizer.zero_grad()
        (model(by.batch(number).half()).float().square().mean() * 64).backward()
        with torch.no_grad():
            for own, full in zip(net.parameters(), master, strict=True):
                full.sub_(0.1 * own.grad.float() / 64)  # type: ignore[union-attr]
                own.copy_(full)
    return {"weights": [one.float() for one in weights(net)]}


@habit(kind=1)
def trains_models_in_changing_order(by: Way) -> Found:
    """Three models, of which each step takes two, in another order each time, the same on all ranks."""
    nets = [mlp() for _ in range(3)]
    models = [by.wrap(net, optimizer) for net, optimizer in nets]
    for number in range(6):
        for index in ((number + 1) % 3, number % 3):
            step(by, models[index], nets[index][1], number)
    return {"weights": [weights(net) for net, _ in nets]}


@habit(kind=2)
def differentiates_forward(by: Way) -> Found:
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


@habit(kind=2)
def evaluates_averaged_weights(by: Way) -> Found:
    """An exponential average of weights, evaluated by ``functional_call`` on the wrapped model between steps."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    average = {name: one.detach().clone() for name, one in model.named_parameters()}
    seen = []
    for number in range(4):
        step(by, model, optimizer, number)
        for name, one in model.named_parameters():
            average[name].lerp_(one.detach(), 0.1)
        with torch.no_grad():
            seen.append(functional_call(model, average, (by.batch(90),)))
    return {"seen": seen, "weights": weights(net)}


@habit(kind=1)
def projects_gradients_to_low_rank(by: Way) -> Found:
    """GaLore: the optimizer's step sees averaged gradients in a basis of their own, which it makes anew at times."""
    net, _ = mlp()
    bases: dict[Any, Tensor] = {}
    made = 0

    def project(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal made
        for one in net.parameters():
            if one.grad is None or one.ndim < 2:
                continue
            if one not in bases or made % 2 == 0:
                bases[one] = torch.linalg.svd(one.grad.detach(), full_matrices=False)[0][:, :1]
            one.grad = bases[one] @ (bases[one].T @ one.grad)
        made += 1

    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(project)
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 5)
    return {"gradients": gradients(net), "weights": weights(net)}


@habit(kind=1)
def frees_models(by: Way) -> Found:
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
def runs_forward_alone(by: Way) -> Found:
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
