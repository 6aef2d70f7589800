"""Local SGD: the mean of weights after every H-th step, after some steps of gradient all-reduce."""

from functools import partial

from contract.algorithms.case import Case, nbytes, plain_sgd, sgd

from bagua.algorithms import LocalSGDAlgorithm

INTERVAL = 2
WARM_UP = 2


def common_step(sim, step):
    sim.backward(step)
    sim.set_gradients([sim.mean(sim.gradients())] * sim.n)
    sim.optimize()


def local_step(sim, step):
    sim.backward(step)
    sim.optimize()


def averaged(sim):
    """x_i = (1/n) sum of all x_i, every other step"""
    for step in range(sim.steps):
        local_step(sim, step)
        if (step + 1) % INTERVAL == 0:
            sim.set_parameters([sim.mean(sim.parameters())] * sim.n)
        yield


def averaged_later(sim):
    for step in range(sim.steps):
        if step < WARM_UP:
            common_step(sim, step)
        else:
            local_step(sim, step)
            if (step + 1 - WARM_UP) % INTERVAL == 0:
                sim.set_parameters([sim.mean(sim.parameters())] * sim.n)
        yield


def close(world, step):
    return 0.0 if world.n < 3 else 2e-6


def met(step):
    return (step + 1) % INTERVAL == 0


def half_encoded(world, step):
    """8 bits of what two steps of at most 0.05 · 1 move, again and again."""
    return 0.1 * 2 / 255 * (step + 1) if len(world.hosts) > 1 else 2e-6


def common_encoded(world, step):
    """8 bits of gradients of at most 1, twice, at rate 0.05, in the common steps."""
    return 0.05 * 2 / 255 * min(step + 1, WARM_UP) + 2e-6 if len(world.hosts) > 1 else 2e-6


CASES = [
    Case(
        "local_sgd",
        partial(LocalSGDAlgorithm, interval=INTERVAL),
        averaged,
        optimizers=sgd,
        tolerance=close,
        replicas_equal=met,
        bucket_bytes=2000,
        bytes_sent=lambda world, model: nbytes(model) / INTERVAL,
        period=INTERVAL,
    ),
    Case(
        "local_sgd after encoded common steps",
        partial(LocalSGDAlgorithm, interval=INTERVAL, warmup_steps=WARM_UP, warmup_codec="minmax8"),
        averaged_later,
        optimizers=plain_sgd,
        tolerance=common_encoded,
        replicas_equal=lambda step: step < WARM_UP or met(step),
    ),
    Case(
        "local_sgd minmax8",
        partial(LocalSGDAlgorithm, interval=INTERVAL, codec="minmax8"),
        averaged,
        optimizers=plain_sgd,
        tolerance=half_encoded,
        replicas_equal=met,
        bytes_sent=lambda world, model: nbytes(model) / 4 / INTERVAL,
        period=INTERVAL,
        slack=0.1,
    ),
]
