"""Helpers of all scenarios: seeded models and batches, and the comparison with one process on all ranks' batches."""

import contextlib
import warnings

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def seeded(make, seed=0):
    torch.manual_seed(seed)
    return make()


def batch(rank, step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * step + rank))


def mlp():
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4))


def square(model, rank, step):
    return model(batch(rank, step, 6, 10)).square().mean()


def wide_mlp():
    """In float64: what rounds in another order, or by other instructions, stays small over many steps."""
    return mlp().double()


def wide_square(model, rank, step):
    return model(batch(rank, step, 6, 10).double()).square().mean()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def wrap(model, *optimizers, average=True, **options):
    return model.with_bagua(list(optimizers), GradientAllReduceAlgorithm(average=average), **options)


def check_identical(model):
    """All ranks hold the same bits."""
    for name, parameter in model.named_parameters():
        mine = parameter.detach().contiguous().view(-1).view(torch.uint8)
        everyone = torch.zeros(bagua.get_world_size(), mine.numel(), dtype=torch.uint8)
        bagua.allgather(mine, everyone)
        assert bool((everyone == everyone[0]).all()), f"{name} differs between ranks"


def check_close(found, wanted, tolerance=1e-5):
    for (name, mine), other in zip(found.named_parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(
            mine, other, rtol=tolerance, atol=tolerance / 10, msg=lambda text, n=name: f"{n}: {text}"
        )
        assert (mine.grad is None) == (other.grad is None), f"gradient of {name}: {mine.grad} is not {other.grad}"
        if mine.grad is not None:
            gradients = mine.grad.to_dense(), other.grad.to_dense()
            torch.testing.assert_close(*gradients, rtol=max(tolerance, 1e-4), atol=tolerance / 10)


def compare(
    make,
    loss=square,
    optimizer=sgd,
    *,
    steps=5,
    set_to_none=True,
    average=True,
    tolerance=1e-5,
    between=lambda model: None,
    synced=(True,),
    algorithm=None,
    **options,
):
    """Trains ``make()`` wrapped, from rank 0's state, and as one process; both must agree. Returns the wrapped model.
    ``between``: backward and the optimizer's step; ``synced``: the passes of each step."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(make), seeded(make, seed=rank)  # different on every rank: rank 0's counts
    optimizers = optimizer(reference), optimizer(model)
    model.with_bagua([optimizers[1]], algorithm or GradientAllReduceAlgorithm(average=average), **options)
    for step in range(steps):
        for one in optimizers:
            one.zero_grad(set_to_none)
        for part, sync in enumerate(synced, step * len(synced)):
            (sum(loss(reference, other, part) for other in range(n)) / (n if average else 1)).backward()
            with contextlib.nullcontext() if sync else model.bagua_ddp.no_sync():
                loss(model, rank, part).backward()
        for one, made in zip((reference, model), optimizers, strict=True):
            between(one)
            made.step()
    check_close(model, reference, tolerance)
    check_identical(model)
    return model


def check_close_parameters(model, reference, rtol=1e-4, atol=1e-6):
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)


@contextlib.contextmanager
def warnings_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def shard(model, ignored=(), layers=True):
    """Divides the model among the ranks of the island: each layer is a unit of FSDP, and so is the rest; or, without
    ``layers``, the whole. ``ignored``: names of layers that stay whole."""
    from torch.distributed.device_mesh import init_device_mesh  # not in ranks without shards: it takes a second
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    left_out = {one for name in ignored for one in model.get_submodule(name).parameters()}
    for name, layer in model.named_children():
        if layers and name not in ignored and list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params=left_out or None)


def whole_parameters(model):
    """Copies of the parameters, put together from the ranks of the island, all of which call it."""
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).detach().clone() for one in model.parameters()]
