"""Programs that put something else in the place of gradients or weights."""

from __future__ import annotations

from habits.case import Found, Way, habit, mlp, weights


@habit(kind=1)
def sets_data_of_gradients(by: Way) -> Found:
    """Clipping, scaling: ``p.grad.data = ...``"""
    net, optimizer = mlp()
    model = by.wrap(net, optimizer)
    for number in range(8):
        optimizer.zero_grad()
        model(by.batch(number)).square().mean().backward()
        for one in net.parameters():
            one.grad.data = one.grad.data.clamp(-0.05, 0.05)
        optimizer.step()
    return {"weights": weights(net)}
