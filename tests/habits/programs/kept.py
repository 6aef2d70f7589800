"""Programs that keep gradients or weights beyond the pass that made them."""

from __future__ import annotations

import torch
from habits.case import Found, Way, gradients, habit, mlp, weights


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
