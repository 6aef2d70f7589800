"""Gradient all-reduce: every rank applies the mean or the sum of all gradients."""

from functools import partial

from contract.algorithms.case import Case, adam, plain_sgd
from contract.algorithms.exchange import share

from bagua.algorithms import Codec, GradientAllReduceAlgorithm


def mean_of_gradients(sim):
    """g = (1/n) sum of all g_i"""
    for step in range(sim.steps):
        sim.backward(step)
        sim.set_gradients([sim.mean(sim.gradients())] * sim.n)
        sim.optimize()
        yield


def sum_of_gradients(sim):
    """g = sum of all g_i"""
    for step in range(sim.steps):
        sim.backward(step)
        sim.set_gradients([sim.sum(sim.gradients())] * sim.n)
        sim.optimize()
        yield


def lossy(error):
    """Error that encoding may add to plain SGD at rate 0.05: ``error`` of a gradient of at most 1, new in every step.
    On one host nothing is encoded."""
    return lambda world, step: 0.05 * error * (step + 1) ** 0.5 if len(world.hosts) > 1 else 0.0


# name -> (bytes sent per byte, error of a result whose inputs are at most 1: both encodings together)
CODECS = {
    "fp16": (1 / 2, 2 * 2.0**-11),
    "bf16": (1 / 2, 2 * 2.0**-8),
    "fp8_e4m3": (1 / 4, 2 * 2.0**-4),
    "fp8_e5m2": (1 / 4, 2 * 2.0**-3),
    "minmax8": (1 / 4, 2 / 255),
    "int4": (1 / 8, 2 / 14),
    "int2": (1 / 16, 1.5),
    "onebit": (1 / 32, 1.5),
    "topk": (1.5 * 0.1, 0.5),
}


def encoded(name):
    """With a codec; topk keeps a tenth."""
    return GradientAllReduceAlgorithm(codec=Codec("topk", density=0.1) if name == "topk" else name)


CASES = [
    Case("gradient_allreduce", GradientAllReduceAlgorithm, mean_of_gradients, bytes_sent=share(1)),
    Case(
        "gradient_allreduce sum",
        partial(GradientAllReduceAlgorithm, average=False),
        sum_of_gradients,
        optimizers=adam,
        bucket_bytes=2000,
    ),
    Case(
        "gradient_allreduce own memory",
        partial(GradientAllReduceAlgorithm, hierarchical=True),
        mean_of_gradients,
        options={"do_flatten": False},
        bucket_bytes=3000,
    ),
    *(
        Case(
            f"gradient_allreduce {name}",
            partial(encoded, name),
            mean_of_gradients,
            optimizers=plain_sgd,
            tolerance=lossy(error),
            bytes_sent=share(ratio),
            slack=0.1,
        )
        for name, (ratio, error) in CODECS.items()
    ),
]
