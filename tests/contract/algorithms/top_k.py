"""Top-k: the largest gradients now, the others later."""

from functools import partial

import torch
from contract.algorithms.case import Case, nbytes, plain_sgd
from contract.algorithms.gradient_allreduce import mean_of_gradients

from bagua.algorithms import TopKAlgorithm

WARM_UP = 3
DENSITY = 0.1


def full_first(world, step):
    """Full precision at first; then rate times gradients of at most 1 that have not been sent, in every step."""
    if step < WARM_UP or len(world.hosts) == 1:
        return 0.0 if world.n < 3 else 1e-6
    return 0.05 * 2.0 * (step + 1 - WARM_UP)


def largest(values):
    kept = values.abs().topk(-(-values.numel() * round(DENSITY * 65536) // 65536)).indices
    return torch.zeros_like(values).index_copy_(0, kept, values[kept])


def sparse_means(sim):
    """Every rank sends the largest of g_i + e_i, and keeps the others in e_i; so does the mean, with an error that all
    ranks know. As it is where ranks of one host exchange encoded gradients."""
    errors = sim.state["errors"] = [torch.zeros_like(values) for values in sim.parameters()]
    error = torch.zeros_like(errors[0])
    for step in range(sim.steps):
        sim.backward(step)
        sent = []
        for rank, gradient in enumerate(sim.gradients()):
            whole = gradient + errors[rank]
            sent.append(largest(whole))
            errors[rank] = whole - sent[rank]
        whole = sim.mean(sent) + error
        result = largest(whole)
        error = whole - result
        sim.set_gradients([result] * sim.n)
        sim.optimize()
        yield


CASES = [
    Case(
        "top_k",
        partial(TopKAlgorithm, density=DENSITY, warmup_steps=WARM_UP),
        mean_of_gradients,
        optimizers=plain_sgd,
        tolerance=full_first,
        warm_up=WARM_UP + 1,
        bytes_sent=lambda world, model: 1.5 * DENSITY * nbytes(model),
        slack=0.1,
    ),
    Case(
        "top_k everywhere",
        partial(TopKAlgorithm, density=DENSITY, everywhere=True),
        sparse_means,
        optimizers=plain_sgd,
        worlds=("1 rank", "2 ranks"),
        tolerance=1e-6,
    ),
]
