"""ByteGrad: the mean or the sum of gradients, in eight bits."""

from functools import partial

from contract.algorithms.case import Case, plain_sgd
from contract.algorithms.exchange import Coder, share
from contract.algorithms.gradient_allreduce import lossy, mean_of_gradients, sum_of_gradients

from bagua.algorithms import ByteGradAlgorithm


def everywhere(sim):
    """g = C(mean of C(g_i)), as on one host."""
    code = Coder("minmax8", sim.models[0])
    for step in range(sim.steps):
        sim.backward(step)
        mean = sim.mean([code(gradient) for gradient in sim.gradients()])
        sim.set_gradients([code(mean)] * sim.n)
        sim.optimize()
        yield


def twice_encoded(world, step):
    """Nothing but the codec's kernel on one host; on two the engine encodes sums once more."""
    return lossy(4 / 255)(world, step)


def of_a_sum(world, step):
    return world.n * lossy(2 / 255)(world, step)


CASES = [
    Case(
        "bytegrad",
        ByteGradAlgorithm,
        mean_of_gradients,
        optimizers=plain_sgd,
        tolerance=lossy(2 / 255),
        bytes_sent=share(1 / 4),
    ),
    Case(
        "bytegrad sum",
        partial(ByteGradAlgorithm, average=False),
        sum_of_gradients,
        optimizers=plain_sgd,
        tolerance=of_a_sum,
    ),
    Case(
        "bytegrad everywhere",
        partial(ByteGradAlgorithm, hierarchical=False),
        everywhere,
        optimizers=plain_sgd,
        tolerance=twice_encoded,
        bytes_sent=share(1 / 4),
    ),
]
