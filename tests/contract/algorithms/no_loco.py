"""NoLoCo: outer steps on the mean of random pairs."""

from functools import partial

import torch
from contract.algorithms.case import Case, adam, nbytes
from contract.algorithms.local_sgd import local_step

from bagua.algorithms import NoLoCoAlgorithm

INTERVAL = 2
RATE, MOMENTUM, CONSENSUS = 0.7, 0.5, 1.0


def pairs(count, number):
    """The pairs of a round; the last rank is alone where the count is odd."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(number)).tolist()
    return [order[at : at + 2] for at in range(0, count, 2)]


def paired(sim, hosts=False):
    """Every other step; pairs of ranks, or of hosts with all their ranks."""
    anchors = sim.state["copied anchors"] = sim.parameters()
    velocities = sim.state["copied velocities"] = [torch.zeros_like(anchor) for anchor in anchors]
    for step in range(sim.steps):
        units = sim.world.hosts if hosts else tuple((rank,) for rank in range(sim.n))
        local_step(sim, step)
        if (step + 1) % INTERVAL == 0:
            weights = sim.parameters()
            for pair in pairs(len(units), step // INTERVAL):
                members = [rank for unit in pair for rank in units[unit]]
                moved = sum(weights[rank] - anchors[rank] for rank in members) / len(members)
                middle = sum(anchors[rank] for rank in members) / len(members)
                for rank in members:
                    velocities[rank] = MOMENTUM * velocities[rank] + RATE * moved - CONSENSUS * (anchors[rank] - middle)
                for rank in members:
                    anchors[rank] = anchors[rank] + velocities[rank]
            sim.set_parameters(anchors)
        yield


def close(world, step):
    return 2e-6 * (step + 1)


def between_hosts(world, model):
    """With two hosts: all of them meet."""
    return nbytes(model) / INTERVAL


CASES = [
    Case(
        "no_loco",
        partial(NoLoCoAlgorithm, interval=INTERVAL),
        paired,
        optimizers=adam,
        steps=8,
        tolerance=close,
        replicas_equal=False,
        bucket_bytes=2000,
    ),
    Case(
        "no_loco of hosts",
        partial(NoLoCoAlgorithm, interval=INTERVAL, hierarchical=True),
        partial(paired, hosts=True),
        optimizers=adam,
        steps=8,
        tolerance=close,
        replicas_equal=False,
        bytes_sent=between_hosts,
        period=INTERVAL,
    ),
]
