"""DiLoCo: outer Nesterov steps on what ranks have moved; and its streaming form."""

from functools import partial

import torch
from contract.algorithms.case import Case, adam, nbytes
from contract.algorithms.local_sgd import common_step, local_step

from bagua.algorithms import DiLoCoAlgorithm, StreamingDiLoCoAlgorithm

INTERVAL = 2
WARM_UP = 2
RATE, MOMENTUM = 0.7, 0.9

STREAM_INTERVAL, FRAGMENTS, OVERLAP, MIXING = 4, 2, 1, 0.5
FRAGMENT_OF = {"4": 0, "2": 1, "0": 0}
"""Modules of ``mlp``: the last goes to the first fragment, the next one to the other, the first one to the smaller."""


class Outer:
    """Anchor and velocity of some parameters."""

    def __init__(self, anchor):
        self.anchor = anchor
        self.velocity = torch.zeros_like(anchor)

    def step(self, gradient):
        """Nesterov's; returns the anchor."""
        self.velocity = MOMENTUM * self.velocity + gradient
        self.anchor = self.anchor - RATE * (gradient + MOMENTUM * self.velocity)
        return self.anchor


def outer_steps(sim, warm_up=0):
    outer = Outer(sim.parameters()[0])
    for step in range(sim.steps):
        if step < warm_up:
            common_step(sim, step)
            outer = Outer(sim.parameters()[0])
        else:
            local_step(sim, step)
            if (step + 1 - warm_up) % INTERVAL == 0:
                moved = [outer.anchor - weights for weights in sim.parameters()]
                sim.set_parameters([outer.step(sim.mean(moved))] * sim.n)
        yield


def streamed(sim):
    """Fragments in turns; each arrives a step after it was sent, and is mixed with what weights are then. One that is
    under way when members change is taken anew when it should arrive."""
    fragment = torch.cat(
        [
            torch.full((parameter.numel(),), FRAGMENT_OF[name.partition(".")[0]])
            for name, parameter in sim.models[0].named_parameters()
        ]
    )
    outers = [Outer(sim.parameters()[0][fragment == number]) for number in range(FRAGMENTS)]
    sent = {}
    for step in range(1, sim.steps + 1):
        if sim.members_changed():
            sent = dict.fromkeys(sent)
        local_step(sim, step - 1)
        for number, outer in enumerate(outers):
            first = (number + 1) * STREAM_INTERVAL // FRAGMENTS
            values = sim.parameters()
            if (number, step - OVERLAP) in sent:
                arrived = sent.pop((number, step - OVERLAP))
                now = sim.mean([outer.anchor - mine[fragment == number] for mine in values])
                anchor = outer.step(now if arrived is None else arrived)
                for mine in values:
                    mine[fragment == number] = MIXING * mine[fragment == number] + (1 - MIXING) * anchor
                sim.set_parameters(values)
            if step >= first and (step - first) % STREAM_INTERVAL == 0:
                sent[number, step] = sim.mean([outer.anchor - mine[fragment == number] for mine in values])
        yield


def close(world, step):
    return 2e-6 * (step + 1)


def encoded(levels):
    """Tolerance: Adam moves at most 0.01 per step, 4 steps make an interval, and Nesterov's rate is up to 1.4."""
    return 2 * 0.04 * 1.4 * 1.4 * 2 / levels


def rounded(levels, world, step):
    return encoded(levels) if len(world.hosts) > 1 else close(world, step)


CASES = [
    Case(
        "diloco",
        partial(DiLoCoAlgorithm, interval=INTERVAL),
        outer_steps,
        optimizers=adam,
        tolerance=close,
        replicas_equal=lambda step: (step + 1) % INTERVAL == 0,
        bucket_bytes=2000,
        bytes_sent=lambda world, model: nbytes(model) / INTERVAL,
        period=INTERVAL,
    ),
    Case(
        "diloco after common steps",
        partial(DiLoCoAlgorithm, interval=INTERVAL, warmup_steps=WARM_UP),
        partial(outer_steps, warm_up=WARM_UP),
        optimizers=adam,
        tolerance=close,
        replicas_equal=lambda step: step < WARM_UP or (step + 1) % INTERVAL == 0,
    ),
    Case(
        "streaming_diloco",
        partial(StreamingDiLoCoAlgorithm, STREAM_INTERVAL, FRAGMENTS, OVERLAP, MIXING, codec=None),
        streamed,
        optimizers=adam,
        steps=10,
        tolerance=close,
        replicas_equal=False,
        bytes_sent=lambda world, model: nbytes(model) / STREAM_INTERVAL,
        period=STREAM_INTERVAL,
    ),
    *(
        Case(
            f"streaming_diloco int{bits}",
            partial(StreamingDiLoCoAlgorithm, STREAM_INTERVAL, FRAGMENTS, OVERLAP, MIXING, codec=f"int{bits}"),
            streamed,
            optimizers=adam,
            steps=10,
            tolerance=partial(rounded, levels),
            replicas_equal=False,
            bytes_sent=lambda world, model, bits=bits: nbytes(model) * bits / 32 / STREAM_INTERVAL,
            period=STREAM_INTERVAL,
            slack=0.1,
        )
        for bits, levels in ((2, 2), (4, 14))
    ),
]
