"""Programs whose steps are not one call of the model in training mode and one backward pass."""

from __future__ import annotations

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
