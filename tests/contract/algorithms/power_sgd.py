"""PowerSGD: gradients as products of thin matrices, with what they lack added to the next ones."""

import zlib
from functools import partial

import torch
from contract.algorithms.case import Case, plain_sgd, sgd
from contract.algorithms.local_sgd import close, common_step

from bagua.algorithms import PowerSGDAlgorithm

RANK = 2
START_AFTER = 2


def first_factor(name, columns):
    """Q of the first step, [columns, rank]: the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"0 {name}".encode()))
    return torch.randn(RANK, columns, generator=generator).t()


def compress(sim):
    """One step, parameter by parameter: M = g + e; P = orthonormal(mean M Q); Q = mean Mᵀ P; e = M - P Qᵀ."""
    names = [name for name, _ in sim.models[0].named_parameters()]
    for name in names:
        gradients = [dict(model.named_parameters())[name].grad for model in sim.models]
        assert all(gradient is not None for gradient in gradients)
        if gradients[0].dim() < 2:
            result = sim.mean(gradients)
        else:
            errors = sim.state.setdefault(f"{name} errors", [torch.zeros_like(g) for g in gradients])
            factor = sim.state.setdefault(f"{name} factor", first_factor(name, gradients[0].shape[1]))
            whole = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
            basis = torch.linalg.qr(sim.mean([matrix @ factor for matrix in whole]))[0]
            factor = sim.mean([matrix.t() @ basis for matrix in whole])
            result = basis @ factor.t()
            sim.state[f"{name} factor"] = factor
            sim.state[f"{name} errors"] = [matrix - result for matrix in whole]
        for model in sim.models:
            dict(model.named_parameters())[name].grad = result.clone()


def compressed(sim):
    for step in range(sim.steps):
        sim.backward(step)
        compress(sim)
        sim.optimize()
        yield


def compressed_later(sim):
    for step in range(sim.steps):
        if step < START_AFTER:
            common_step(sim, step)
        else:
            sim.backward(step)
            compress(sim)
            sim.optimize()
        yield


def rounding(world, step):
    """Products and bases differ in their last bits; bases of nearly dependent columns in more."""
    return 2e-5 * (step + 1)


def later(world, step):
    return close(world, step) if step < START_AFTER else rounding(world, step)


def thin(world, model):
    """P and Q of each matrix, and vectors as they are, in float32."""
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    return 4.0 * sum(shape[0] if len(shape) == 1 else RANK * sum(shape) for shape in shapes)


CASES = [
    Case(
        "power_sgd",
        partial(PowerSGDAlgorithm, rank=RANK, min_compression_rate=1.0),
        compressed,
        optimizers=plain_sgd,
        tolerance=rounding,
        bucket_bytes=2000,
        bytes_sent=thin,
    ),
    Case(
        "power_sgd after full steps",
        partial(PowerSGDAlgorithm, rank=RANK, start_after=START_AFTER, min_compression_rate=1.0),
        compressed_later,
        optimizers=sgd,
        tolerance=later,
    ),
]
