"""Programs that keep gradients or weights beyond the pass that made them."""

import copy

import torch
from habits.case import gradients, habit, mlp, step, train, weights, wrapped


@habit(kind=1)
def keeps_gradients(by):
    """Pytorch-PCGrad#5: gradients of one pass beside those of the next."""
    net, model, optimizer = wrapped(by)
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


class KeepsLast(torch.optim.Optimizer):
    """Steps along this gradient and the last one, which it keeps without a copy."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                last = self.state[one].get("last", one.grad)
                one.sub_(group["lr"] * (1.5 * one.grad - 0.5 * last))
                self.state[one]["last"] = one.grad


@habit(kind=1)
def has_an_optimizer_that_keeps_gradients(by):
    """Its state is ``p.grad`` itself."""
    net, _ = mlp()
    optimizer = KeepsLast(net.parameters())
    model = by.wrap(net, optimizer)
    train(by, model, optimizer, 5)
    return {"weights": weights(net), "state": [optimizer.state[one]["last"] for one in net.parameters()]}


@habit(kind=1)
def looks_at_weights_through_numpy(by):
    """Views taken before the model is wrapped, and after: both follow the weights."""
    net, optimizer = mlp()
    before = [one.detach().numpy() for one in net.parameters()]
    model = by.wrap(net, optimizer)
    after = [one.detach().numpy() for one in net.parameters()]
    train(by, model, optimizer)
    now = [one.detach().numpy() for one in net.parameters()]
    same = [bool((one == other).all()) for views in (before, after) for one, other in zip(views, now, strict=True)]
    return {"follows": all(same), "weights": weights(net)}


@habit(kind=1)
def keeps_a_state_dict(by):
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
def averages_weights(by):
    """An average of the weights in a copy of the model, into which and from which weights are swapped."""
    net, model, optimizer = wrapped(by)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for number in range(3):
        step(by, model, optimizer, number)
        average.update_parameters(net)

    def swap():
        for one, other in zip(net.parameters(), average.module.parameters(), strict=True):
            one.data, other.data = other.data, one.data

    mine = weights(net)
    swap()
    evaluated = weights(net)
    swap()
    back = all(torch.equal(one, other) for one, other in zip(mine, net.parameters(), strict=True))
    train(by, model, optimizer, 2)
    return {"evaluated": evaluated, "back": back, "weights": weights(net)}


@habit(kind=1)
def looks_at_storages(by):
    """Each gradient and weight has a storage of its own, from its beginning to its end."""
    net, model, optimizer = wrapped(by)
    step(by, model, optimizer, 0)
    found = [one for p in net.parameters() for one in (p.detach(), p.grad) if one is not None]
    return {
        "whole": all(one.untyped_storage().nbytes() == one.nbytes and one.storage_offset() == 0 for one in found),
        "own": len({one.untyped_storage().data_ptr() for one in found}) == len(found),
        "strides": [list(one.stride()) for one in found],
        "base": [one._base is None for one in found],
    }
