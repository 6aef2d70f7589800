"""0/1 Adam: variance from some steps, then local steps with frozen variance."""

import math

import torch
from contract.algorithms.case import Case, nbytes
from contract.algorithms.one_bit_adam import BETA1, BETA2, DECAY, EPSILON, FLOOR, RATE, close, floored

from bagua.algorithms import ZeroOneAdamAlgorithm, ZeroOneAdamOptimizer

FREEZE = 5
FULL_STEPS = {1, 2, 3, 5}
"""Two updates of the variance one step apart, then two steps apart."""

MEETINGS = {6, 7, 9, 11}
"""One step, then, after two steps with frozen variance, two."""


def optimizers(model):
    return [
        ZeroOneAdamOptimizer(
            model.parameters(),
            lr=RATE,
            var_freeze_step=FREEZE,
            var_update_scaler=2,
            local_step_scaler=2,
            local_step_clipper=2,
            weight_decay=DECAY,
            floor=FLOOR,
        )
    ]


def rarely_together(sim):
    """Adam from mean gradients, whose variance takes part in some steps; then every rank for itself, and meetings in
    which weights become their mean, and momentum what would have moved them so."""
    anchor = sim.parameters()[0]
    momentum, variance = torch.zeros_like(anchor), torch.zeros_like(anchor)
    denominator = anchor
    updates, moved, decay = 0, 0.0, 1.0
    momenta = [momentum] * sim.n
    for number in range(1, sim.steps + 1):
        sim.backward(number - 1)
        rate = RATE / (1 - math.pow(BETA1, number))
        if number <= FREEZE:
            gradient = sim.mean(sim.gradients())
            momentum = BETA1 * momentum + (1 - BETA1) * gradient
            if number in FULL_STEPS:
                updates += 1
                variance = BETA2 * variance + (1 - BETA2) * gradient.square()
            denominator = floored(sim, (variance / (1 - BETA2**updates)).sqrt() + EPSILON)
            anchor = (1 - RATE * DECAY) * anchor - rate * momentum / denominator
            sim.set_parameters([anchor] * sim.n)
            momenta = [momentum / denominator] * sim.n
        else:
            momenta = [
                BETA1 * mine + (1 - BETA1) * gradient / denominator
                for mine, gradient in zip(momenta, sim.gradients(), strict=True)
            ]
            sim.set_parameters([weights - rate * mine for weights, mine in zip(sim.parameters(), momenta, strict=True)])
            moved, decay = moved + rate, decay - RATE * DECAY
            if number in MEETINGS:
                mean = sim.mean([anchor - weights for weights in sim.parameters()])
                momenta = [mean / moved] * sim.n
                anchor = (anchor - mean) * decay
                sim.set_parameters([anchor] * sim.n)
                moved, decay = 0.0, 1.0
        yield


def one_bit(world, step):
    """Between hosts: 0.01 times the magnitude of scaled gradients, about 1, per step; encoded twice."""
    return close(world, step) if step < 3 or len(world.hosts) == 1 else 0.01 * 6 * (step - 2)


def together(step):
    return step + 1 <= FREEZE or step + 1 in MEETINGS


CASES = [
    Case(
        "zero_one_adam",
        ZeroOneAdamAlgorithm,
        rarely_together,
        optimizers=optimizers,
        steps=11,
        tolerance=one_bit,
        replicas_equal=together,
        warm_up=FREEZE + 2,
        bytes_sent=lambda world, model: nbytes(model) / 32 / 2,
        period=2,
        slack=0.1,
    ),
]
