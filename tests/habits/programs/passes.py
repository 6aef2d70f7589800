"""Programs whose steps are not one call of the model in training mode and one backward pass."""

import warnings

import torch
from habits.case import gradients, habit, square, state, weights, wrapped
from torch.func import functional_call


@habit(kind=3)
def sets_sync_attribute(by):
    """nanoGPT: ``model.require_backward_grad_sync`` is set in each micro-step."""
    net, model, optimizer = wrapped(by)
    found, before = [], model.require_backward_grad_sync
    for number in range(6):
        model.require_backward_grad_sync = number % 3 == 2
        square(model, by.batch(number)).backward()
        found.append(gradients(net))
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
    return {"before": before, "gradients": found, "weights": weights(net)}


@habit(kind=2, only=("backend", "with_bagua", "our_ddp", "elastic", "decentralized"))
def compiles_the_whole_step(by):
    """A compiled function that holds the forward pass, the backward pass and the optimizer's step."""
    net, model, optimizer = wrapped(by)

    def whole(batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.compile, about itself
        fast = torch.compile(whole, backend="eager")
        losses = [fast(by.batch(number)).detach() for number in range(3)]
    torch._dynamo.reset()
    return {"losses": losses, "weights": weights(net)}


@habit(kind=2)
def learns_to_learn(by):
    """MAML: an inner step that keeps its graph, and an outer loss at the weights behind it."""
    net, model, optimizer = wrapped(by)
    for number in range(6):
        optimizer.zero_grad()
        named = dict(model.named_parameters())
        with by.no_sync(model):
            inner = model(by.batch(number)).square().mean()
            steps = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        fast = {name: one - 0.1 * step for (name, one), step in zip(named.items(), steps, strict=True)}
        functional_call(model, fast, (by.batch(100 + number),)).square().mean().backward()
        optimizer.step()
    return state(net)
