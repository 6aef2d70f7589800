"""Learning rates follow the number of ranks, and their schedulers go on from there."""

import pytest
import torch
from torch.optim import lr_scheduler

from bagua.torch_api.data.learning_rate import scale


def sgd(rate):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)


def rates(optimizer, scheduler, steps, *metrics):
    """The learning rate after each of so many steps."""
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*metrics)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_a_plateau_ends_in_the_same_proportion():
    """Half the ranks: the rate is halved, and so is the least one."""
    optimizer = sgd(0.4)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, min_lr=0.1)
    rates(optimizer, scheduler, 1, 1.0)
    scale((optimizer, scheduler), 0.5)
    assert rates(optimizer, scheduler, 3, 1.0) == pytest.approx([0.1, 0.05, 0.05])


@pytest.mark.parametrize(
    "make",
    [
        lambda one: lr_scheduler.StepLR(one, step_size=2, gamma=0.1),
        lambda one: lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step)),
        lambda one: lr_scheduler.CyclicLR(one, base_lr=0.1, max_lr=0.8, step_size_up=3, cycle_momentum=False),
        lambda one: lr_scheduler.OneCycleLR(one, max_lr=0.8, total_steps=8, cycle_momentum=False),
        lambda one: lr_scheduler.CosineAnnealingLR(one, T_max=10),
    ],
    ids=["step", "lambda", "cyclic", "one cycle", "cosine"],
)
def test_schedules_keep_their_shape(make):
    plain, scaled = sgd(0.4), sgd(0.4)
    schedulers = make(plain), make(scaled)
    assert rates(plain, schedulers[0], 2) == rates(scaled, schedulers[1], 2)
    scale((scaled, schedulers[1]), 0.25)
    wanted = [0.25 * rate for rate in rates(plain, schedulers[0], 5)]
    assert rates(scaled, schedulers[1], 5) == pytest.approx(wanted)
