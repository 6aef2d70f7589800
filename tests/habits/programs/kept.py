"""Programs that keep gradients or weights beyond the pass that made them."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from habits.case import Found, Way, gradients, habit, mlp, step, train, weights
from torch import Tensor, nn


@habit(kind=1)
def keeps_gradients(by: Way) -> Found:
    """Pytorch-PCGrad#5: gradients of one pass beside those of the next."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    same = []
    for number in range(3):
        optimizer.zero_grad()
        model(by.batch(number)).mean().backward()
        kept, copies = [one.grad for one in net.parameters()], gradients(net)
        optimizer.zero_grad()
        model(3 * by.batch(number)).mean().backward()
        same += [torch.equal(one, copy) for one, copy in zip(kept, copies, strict=True)]
        optimizer.step()
    return {"same": all(same), "kept": kept, "weights": weights(net)}


@habit(kind=1)
def projects_gradients_of_two_losses(by: Way) -> Found:
    """Gradient surgery: a pass for each loss, and the part of one gradient against the other goes."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(3):
        losses = []
        for column in range(2):
            optimizer.zero_grad()
            model(by.batch(number))[:, column].square().mean().backward()
            losses.append([one.grad for one in net.parameters()])
        for parameter, first, second in zip(net.parameters(), *losses, strict=True):
            against = (first * second).sum().clamp(max=0.0)
            parameter.grad = first - against * second / second.square().sum().clamp(min=1e-12) + second
        optimizer.step()
    return {"weights": weights(net)}


@habit(kind=1)
def keeps_a_history(by: Way) -> Found:
    """A monitor: the gradients of all steps in a list, looked at when training is over."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    history = []
    for number in range(4):
        step(by, model, optimizer, number)
        history.append([one.grad for one in net.parameters()])
    return {"history": history, "weights": weights(net)}


@habit(kind=1)
def keeps_a_full_gradient(by: Way) -> Found:
    """SVRG: the gradient at a snapshot of the weights corrects those of the next steps."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for epoch in range(2):
        snapshot = weights(net)
        optimizer.zero_grad(set_to_none=True)
        model(by.batch(10 * epoch)).square().mean().backward()
        full = [one.grad for one in net.parameters()]
        for number in range(2):
            now = weights(net)
            put(net, snapshot)
            optimizer.zero_grad(set_to_none=True)
            model(by.batch(10 * epoch + number)).square().mean().backward()
            old = [one.grad for one in net.parameters()]
            put(net, now)
            optimizer.zero_grad(set_to_none=True)
            model(by.batch(10 * epoch + number)).square().mean().backward()
            for one, before, whole in zip(net.parameters(), old, full, strict=True):
                assert one.grad is not None
                one.grad += whole - before
            optimizer.step()
    return {"weights": weights(net)}


@torch.no_grad()
def put(net: nn.Module, values: list[Tensor]) -> None:
    """Copies values into the parameters."""
    for one, value in zip(net.parameters(), values, strict=True):
        one.copy_(value)


class KeepsLast(torch.optim.Optimizer):
    """Steps along this gradient and the last one, which it keeps without a copy."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                last = self.state[one].get("last", one.grad)
                one.sub_(group["lr"] * (1.5 * one.grad - 0.5 * last))
                self.state[one]["last"] = one.grad


@habit(kind=1)
def has_an_optimizer_that_keeps_gradients(by: Way) -> Found:
    """Its state is ``p.grad`` itself."""
    net, _ = mlp()
    optimizer = KeepsLast(net.parameters())
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 5)
    return {"weights": weights(net), "state": [optimizer.state[one]["last"] for one in net.parameters()]}


@habit(kind=1)
def averages_into_a_kept_gradient(by: Way) -> Found:
    """Momentum whose buffer is the first gradient: changed in place in each step."""
    net, _ = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = by.wrap(net, optimizer)
    averages: list[Tensor] = []
    for number in range(4):
        step(by, model, optimizer, number)
        now = [one.grad for one in net.parameters()]
        averages = averages or now  # type: ignore[assignment]
        for average, one in zip(averages, now, strict=True):
            assert one is not None
            average.mul_(0.9).add_(one, alpha=0.1)
    return {"averages": averages, "weights": weights(net)}


@habit(kind=1)
def weighs_losses_by_their_gradients(by: Way) -> Found:
    """GradNorm: norms of two losses' gradients from autograd.grad weigh them in the pass."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    norms = []
    for number in range(3):
        optimizer.zero_grad()
        losses = model(by.batch(number)).square().mean(0)
        of_last = [torch.autograd.grad(loss, net[2].weight, retain_graph=True)[0].norm() for loss in losses]
        mean = by.mean(torch.stack(of_last))
        (losses / mean).sum().backward()
        optimizer.step()
        norms.append(mean)
    return {"norms": norms, "weights": weights(net)}


@habit(kind=1)
def looks_at_gradients_through_numpy(by: Way) -> Found:
    """Views of NumPy, taken once a step and kept."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    kept, copies = [], []
    for number in range(3):
        step(by, model, optimizer, number)
        kept += [one.grad.numpy() for one in net.parameters() if one.grad is not None]
        copies += [one.copy() for one in kept[-4:]]
    return {"same": all((one == other).all() for one, other in zip(kept, copies, strict=True)), "weights": weights(net)}


@habit(kind=1)
def looks_at_weights_through_numpy(by: Way) -> Found:
    """Views taken before the model is wrapped, and after: both follow the weights."""
    net, optimizer = mlp()
    before = [one.detach().numpy() for one in net.parameters()]
    model = by.wrap(net, optimizer)
    after = [one.detach().numpy() for one in net.parameters()]
    train(by, model, optimizer)
    return {
        "before": all((view == one.detach().numpy()).all() for view, one in zip(before, net.parameters(), strict=True)),
        "after": all((view == one.detach().numpy()).all() for view, one in zip(after, net.parameters(), strict=True)),
        "weights": weights(net),
    }


@habit(kind=1)
def keeps_a_state_dict(by: Way) -> Found:
    """A state dict refers to the weights: it follows them, and loading a copy of it brings them back."""
    net, optimizer = mlp()
    state = net.state_dict()
    model = by.wrap(net, optimizer)
    best = copy.deepcopy(net.state_dict())
    train(by, model, optimizer)
    follows = all(torch.equal(state[name], one) for name, one in net.named_parameters())
    net.load_state_dict(best)
    train(by, model, optimizer, 2)
    return {"follows": follows, "best": list(best.values()), "weights": weights(net)}


@habit(kind=1)
def averages_weights(by: Way) -> Found:
    """An average of the weights in a copy of the model, into which and from which weights are swapped."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for number in range(3):
        step(by, model, optimizer, number)
        average.update_parameters(net)
    mine = weights(net)
    for one, other in zip(net.parameters(), average.module.parameters(), strict=True):
        one.data, other.data = other.data, one.data
    evaluated = weights(net)
    for one, other in zip(net.parameters(), average.module.parameters(), strict=True):
        one.data, other.data = other.data, one.data
    back = all(torch.equal(one, other) for one, other in zip(mine, net.parameters(), strict=True))
    train(by, model, optimizer, 2)
    return {"evaluated": evaluated, "back": back, "weights": weights(net)}


@habit(kind=1)
def refers_to_weights(by: Way) -> Found:
    """References to ``p.data`` from before, as an average that needs no look at the model again."""
    net, optimizer = mlp()
    references = [one.data for one in net.parameters()]
    model = by.wrap(net, optimizer)
    average = [one.clone() for one in references]
    for number in range(3):
        step(by, model, optimizer, number)
        for mean, one in zip(average, references, strict=True):
            mean.lerp_(one, 0.5)
    follows = all(torch.equal(one, other) for one, other in zip(references, net.parameters(), strict=True))
    return {"average": average, "follows": follows}


@habit(kind=1)
def copies_the_model(by: Way) -> Found:
    """A deep copy in the middle of training trains by itself, and so does the model."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    step(by, model, optimizer, 0)
    twin = copy.deepcopy(net)
    mine, before = gradients(net), weights(net)
    twin(torch.ones(3, 4)).sum().backward()
    twin.zero_grad(set_to_none=False)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    with torch.no_grad():
        for one in twin.parameters():
            one.fill_(3.0)
    untouched = [torch.equal(*pair) for pair in zip(mine + before, gradients(net) + weights(net), strict=True)]
    train(by, model, optimizer)
    return {"untouched": all(untouched), "twin": weights(twin), "weights": weights(net)}


@habit(kind=1)
def saves_one_parameter(by: Way) -> Found:
    """torch.save of a parameter, or a gradient, writes no more than it holds."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    step(by, model, optimizer, 0)
    sizes = []
    for one in (net[2].bias.detach(), net[2].bias.grad):
        file = io.BytesIO()
        torch.save(one, file)
        sizes.append(len(file.getvalue()))
    return {"small": max(sizes) < 2000, "same": sizes[0] == sizes[1]}


@habit(kind=1)
def looks_at_storages(by: Way) -> Found:
    """Each gradient and weight has a storage of its own, from its beginning to its end."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    step(by, model, optimizer, 0)
    found = [one for p in net.parameters() for one in (p.detach(), p.grad) if one is not None]
    return {
        "whole": all(one.untyped_storage().nbytes() == one.nbytes and one.storage_offset() == 0 for one in found),
        "own": len({one.untyped_storage().data_ptr() for one in found}) == len(found),
        "strides": [list(one.stride()) for one in found],
        "base": [one._base is None for one in found],
    }


@habit(kind=1)
def keeps_gradients_over_steps_without_sync(by: Way) -> Found:
    """Gradients of micro-batches that stay on this rank, each kept, then one that is exchanged."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    kept = []
    for number in range(3):
        with by.no_sync(model):
            optimizer.zero_grad()
            model(by.batch(number)).square().mean().backward()
            kept.append([one.grad for one in net.parameters()])
    optimizer.zero_grad()
    model(by.batch(4)).square().mean().backward()
    optimizer.step()
    train(by, model, optimizer)
    return {"kept": kept, "weights": weights(net)}
