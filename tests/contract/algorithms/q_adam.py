"""QAdam: Adam, whose momentum is averaged encoded after a warm-up."""

from functools import partial

import torch
from contract.algorithms.case import Case
from contract.algorithms.decentralized import accumulate, accumulated
from contract.algorithms.exchange import Coder, share

from bagua.algorithms import QAdamAlgorithm, QAdamOptimizer

WARM_UP = 3
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.01}
SMALL, LARGE = 1e-8, 0.1
"""Values of eps: with the large one an error of momentum is an error of the weights that can be told beforehand."""


FLOOR = 0.1


def optimizers(model, eps=SMALL, floor=0.0):
    """Two groups of settings, the second with another rate of decay."""
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others, "weight_decay": 0.0, "betas": (0.8, 0.99)}]
    return [QAdamOptimizer(groups, warmup_steps=WARM_UP, eps=eps, floor=floor, **SETTINGS)]


def settings(sim):
    first, *others = (parameter.numel() for parameter in sim.models[0].parameters())
    sizes = torch.tensor([first, sum(others)])
    return torch.tensor([0.01, 0.0]).repeat_interleave(sizes), torch.tensor([0.9, 0.8]).repeat_interleave(sizes)


def floored(sim, squares):
    parts = squares.split([parameter.numel() for parameter in sim.models[0].parameters()])
    return torch.cat([part.clamp(min=FLOOR**2 * part.mean()) for part in parts])


def adam_of_means(sim, mean, passes=lambda _: (), eps=SMALL, scaled=False):
    """By the formula, without the optimizer: one pass over flat vectors. ``scaled``: the mean is one of momentum
    divided by its denominator, and v has a floor."""
    decay, beta1 = settings(sim)
    beta2, lr = SETTINGS["betas"][1], SETTINGS["lr"]
    m, v = torch.zeros_like(decay), torch.zeros_like(decay)
    for step in range(sim.steps):
        sim.backward(step, passes(step))
        x, k = sim.parameters()[0], step + 1
        if k <= WARM_UP:
            g = sim.mean(sim.gradients()) + decay * x
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            v = floored(sim, v) if scaled and k == WARM_UP else v
        denominator = v.sqrt() / (1 - beta2**k) ** 0.5 + eps
        if k > WARM_UP:
            divisor = denominator if scaled else torch.ones_like(v)
            m = mean(sim, [(beta1 * m + (1 - beta1) * (g + decay * x)) / divisor for g in sim.gradients()]) * divisor
        update = lr / (1 - beta1**k) * m / denominator
        sim.set_parameters([torch.where(v == 0, x, x - update) if k > WARM_UP else x - update] * sim.n)
        yield


def as_it_is(sim, values):
    return sim.mean(values)


def twice_encoded(codec, fed_back, sim, values):
    """C(mean of C(m_i)), with what was lost in both, as on one host."""
    size = values[0].numel()
    if "code" not in sim.state:
        sim.state["code"] = Coder(codec, sim.models[0])
        sim.state["lost"] = [torch.zeros(size) if fed_back else None for _ in range(sim.n)]
        sim.state["lost of means"] = torch.zeros(size) if fed_back else None
    code, lost = sim.state["code"], sim.state["lost"]
    mean = sim.mean([code(value, lost[rank]) for rank, value in enumerate(values)])
    return code(mean, sim.state["lost of means"])


def decode_error(size):
    """An update is lr m / (1-β1^k) / (√v + 0.1) at most; ``size`` of momentum, which is at most 1/2, is lost."""
    return lambda world, step: 1e-5 + (0.01 / 0.34 * size * 5 * max(0, step + 1 - WARM_UP) if far(world) else 0.0)


def scaled_error(world, step):
    """An update is lr / (1-β1^k) times the mean of m / D, of which one bit loses as much as there is: about 1."""
    return ROUNDING + (0.01 / 0.34 * 2 * max(0, step + 1 - WARM_UP) if far(world) else 0.0)


def far(world):
    return len(world.hosts) > 1


ROUNDING = 1e-5
ONE_HOST = ("1 rank", "2 ranks", "4 ranks")

CASES = [
    Case(
        "qadam full precision",
        partial(QAdamAlgorithm, codec=None),
        partial(adam_of_means, mean=as_it_is),
        optimizers=optimizers,
        steps=8,
        tolerance=ROUNDING,
        bucket_bytes=2000,
    ),
    Case(
        "qadam",
        QAdamAlgorithm,
        partial(adam_of_means, mean=as_it_is, eps=LARGE),
        optimizers=partial(optimizers, eps=LARGE),
        steps=8,
        tolerance=decode_error(2 / 255),
        bytes_sent=share(1 / 4),
        warm_up=WARM_UP + 1,
    ),
    *(
        Case(
            f"qadam {codec} everywhere",
            partial(QAdamAlgorithm, hierarchical=False, codec=codec),
            partial(adam_of_means, mean=partial(twice_encoded, codec, fed_back), eps=LARGE),
            optimizers=partial(optimizers, eps=LARGE),
            steps=8,
            tolerance=ROUNDING,
            flip=0.01 / 0.34 / 255,  # of momentum, which is within ±1/2; see ``decode_error``
            worlds=ONE_HOST,
        )
        for codec, fed_back in (("minmax8", False), ("onebit", True))
    ),
    Case(
        "qadam scaled",
        partial(QAdamAlgorithm, codec="onebit", scaled=True),
        partial(adam_of_means, mean=as_it_is, scaled=True),
        optimizers=partial(optimizers, floor=FLOOR),
        steps=8,
        tolerance=scaled_error,
        bytes_sent=share(1 / 32),
        slack=0.1,
        warm_up=WARM_UP + 1,
    ),
    Case(
        "qadam scaled everywhere",
        partial(QAdamAlgorithm, hierarchical=False, codec="onebit", scaled=True),
        partial(adam_of_means, mean=partial(twice_encoded, "onebit", True), scaled=True),
        optimizers=partial(optimizers, floor=FLOOR),
        steps=8,
        tolerance=4 * ROUNDING,
        worlds=ONE_HOST,
    ),
    Case(
        "qadam accumulation",
        partial(QAdamAlgorithm, codec=None),
        partial(adam_of_means, mean=as_it_is, passes=accumulated),
        optimizers=optimizers,
        steps=6,
        tolerance=ROUNDING,
        train=accumulate,
    ),
]
