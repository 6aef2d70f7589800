"""1-bit Adam: Adam, then frozen variance and mean momentum, scaled by it, in one bit per element."""

import math

import torch
from contract.algorithms.case import Case, nbytes

from bagua.algorithms import OneBitAdamAlgorithm, OneBitAdamOptimizer

WARM_UP = 3
RATE, BETA1, BETA2, EPSILON, DECAY, FLOOR = 0.01, 0.9, 0.999, 1e-8, 0.1, 0.1


def optimizers(model):
    return [OneBitAdamOptimizer(model.parameters(), lr=RATE, warmup_steps=WARM_UP, weight_decay=DECAY, floor=FLOOR)]


def floored(sim, denominators):
    """At least a tenth of each parameter's root mean square."""
    parts = denominators.split([parameter.numel() for parameter in sim.models[0].parameters()])
    return torch.cat([part.clamp(min=FLOOR * part.square().mean().sqrt()) for part in parts])


def adam_then_frozen(sim):
    """Textbook Adam with decoupled decay; when frozen, the mean of all ranks' m / D moves weights."""
    momentum = torch.zeros_like(sim.parameters()[0])
    variance = torch.zeros_like(momentum)
    scaled = denominator = momentum
    for number in range(1, sim.steps + 1):
        sim.backward(number - 1)
        if number <= WARM_UP:
            gradient = sim.mean(sim.gradients())
            momentum = BETA1 * momentum + (1 - BETA1) * gradient
            variance = BETA2 * variance + (1 - BETA2) * gradient.square()
            denominator = (variance / (1 - BETA2**number)).sqrt() + EPSILON
            scaled = momentum / denominator
            if number == WARM_UP:
                denominator = floored(sim, denominator)
        else:
            momentum = scaled * denominator if number > WARM_UP + 1 else momentum
            mine = [BETA1 * momentum / denominator + (1 - BETA1) * g / denominator for g in sim.gradients()]
            scaled = sim.mean(mine)
        step = RATE / (1 - math.pow(BETA1, number))
        sim.set_parameters([(1 - RATE * DECAY) * weights - step * scaled for weights in sim.parameters()])
        yield


def close(world, step):
    """Other order of operations; the first gradients, divided by themselves, have few bits."""
    return 1e-5 * (step + 1)


def one_bit(world, step):
    """Between hosts: 0.01 times the magnitude of scaled momentum, about 1, per frozen step; encoded twice."""
    if step < WARM_UP or len(world.hosts) == 1:
        return close(world, step)
    return 0.01 * 6 * (step + 1 - WARM_UP)


CASES = [
    Case(
        "one_bit_adam",
        OneBitAdamAlgorithm,
        adam_then_frozen,
        optimizers=optimizers,
        tolerance=one_bit,
        warm_up=WARM_UP + 1,
        bytes_sent=lambda world, model: nbytes(model) / 32,
        slack=0.1,
    )
]
