"""Programs whose steps are not one call of the model in training mode and one backward pass."""

from __future__ import annotations

import warnings

import torch
from habits.case import Found, Way, gradients, habit, mlp, weights


@habit(kind=3)
def sets_sync_attribute(by: Way) -> Found:
    """nanoGPT: ``model.require_backward_grad_sync`` is set in each micro-step."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    found, before = [], model.require_backward_grad_sync
    for number in range(6):
        model.require_backward_grad_sync = number % 3 == 2
        model(by.batch(number)).square().mean().backward()
        found.append(gradients(net))
        if model.require_backward_grad_sync:
            optimizer.step()
            optimizer.zero_grad()
    return {"before": before, "gradients": found, "weights": weights(net)}


@habit(kind=2, only=("with_bagua", "our_ddp", "elastic", "decentralized"))
def compiles_the_whole_step(by: Way) -> Found:
    """A compiled function that holds the forward pass, the backward pass and the optimizer's step."""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)

    def whole(batch: torch.Tensor) -> torch.Tensor:
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
