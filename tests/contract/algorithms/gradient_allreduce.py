"""Gradient all-reduce: every rank applies the mean or the sum of all gradients."""

from __future__ import annotations

from collections.abc import Iterator

from contract.algorithms.case import Case, Simulation, World

from bagua.algorithms import GradientAllReduceAlgorithm


def mean_of_gradients(sim: Simulation) -> Iterator[None]:
    """g = (1/n) sum of all g_i"""
    for step in range(sim.steps):
        sim.backward(step)
        sim.set_gradients([sim.mean(sim.gradients())] * sim.n)
        sim.optimize()
        yield


def sum_of_gradients(sim: Simulation) -> Iterator[None]:
    """g = sum of all g_i"""
    for step in range(sim.steps):
        sim.backward(step)
        sim.set_gradients([sim.sum(sim.gradients())] * sim.n)
        sim.optimize()
        yield


def exact(world: World, step: int) -> float:
    """Sums of two hosts' two ranks are the same in every order; a third rank's rounding is not."""
    return 0.0 if world.n < 3 else 1e-6


def twice_the_bytes(world: World, nbytes: int) -> float:
    """2(h-1)/h of the model."""
    return 2 * (len(world.hosts) - 1) / len(world.hosts) * nbytes


CASES = [
    Case(
        "gradient_allreduce", GradientAllReduceAlgorithm, mean_of_gradients, tolerance=exact, bytes_sent=twice_the_bytes
    ),
]
