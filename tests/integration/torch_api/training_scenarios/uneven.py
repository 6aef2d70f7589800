"""``join``: ranks with different numbers of batches, beside one process that trains on all of them."""

import contextlib
import functools
import warnings

import pytest
import torch
from rig.ranks.recutting import Alternating
from torch import nn
from torch.distributed.algorithms.join import Join

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm
from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.data_parallel import DistributedDataParallel
from training_scenarios.support import (
    batch,
    check_close,
    check_close_parameters,
    check_identical,
    scenario,
    seeded,
    sgd,
    wide_mlp,
    wide_square,
    wrap,
)

EXACT = 1e-12


def batches_of(rank):
    """Rank 1 of several has none, and rank 0 fewer than the last."""
    return 2 if rank == 0 else 0 if rank == 1 else 3 + rank


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def fused(model):
    return bagua.contrib.fuse_optimizer(adam(model), do_flatten=True)


def most(n):
    return max(batches_of(rank) for rank in range(n))


def later(model, rank, step):
    """The loss of a second pass."""
    return wide_square(model, rank, 10 + step)


def whole_epoch(model, optimizer, divisor=None, losses=(wide_square,)):
    """Trains on all ranks' batches. ``divisor``: of the number of ranks that have one; else that of all ranks."""
    n = bagua.get_world_size()
    for step in range(most(n)):
        optimizer.zero_grad()
        active = [rank for rank in range(n) if step < batches_of(rank)]
        for rank in active:
            for loss in losses:
                (loss(model, rank, step) / (divisor(len(active)) if divisor else n)).backward()
        optimizer.step()


def epoch(model, optimizer, take_step=None):
    for step in range(batches_of(bagua.get_rank())):
        optimizer.zero_grad()
        wide_square(model, bagua.get_rank(), step).backward()
        (take_step or optimizer.step)()


def check(model, reference):
    check_identical(model)
    check_close_parameters(model, reference, EXACT, EXACT)


@scenario
def uneven_batches():
    """``fuse_optimizer``: its state on all ranks is that of the last rank to have batches, too."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for by_initial, average, kind in ((True, True, sgd), (False, True, sgd), (True, False, sgd), (True, True, fused)):
        reference, model = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
        optimizers = (adam if kind is fused else kind)(reference), kind(model)
        take_step = getattr(optimizers[1], "fuse_step", None)
        wrap(model, optimizers[1], average=average)
        divisor = (lambda active: n if by_initial else active) if average else (lambda active: 1)  # noqa: B023
        for _ in range(2):  # the second begins where the state of optimizers is that of the last rank, too
            whole_epoch(reference, optimizers[0], divisor)
            with bagua.join(model, divide_by_initial_world_size=by_initial):
                epoch(model, optimizers[1], take_step)
            check(model, reference)
            # Outside of the block numbers are even again.
            for part, optimizer in ((reference, optimizers[0]), (model, optimizers[1])):
                optimizer.zero_grad()
                for other in range(n) if part is reference else [rank]:
                    share = n if average and part is reference else 1
                    (wide_square(part, other, 99) / share).backward()
                optimizer.step()
            check_close(model, reference, EXACT)


@scenario
def uneven_accumulation_and_inference():
    """no_sync, evaluation between two steps, a pass that accumulates nothing, and DDP's own way to write it."""
    rank = bagua.get_rank()
    reference, inner = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
    model = DistributedDataParallel(inner)
    optimizers = sgd(reference), sgd(inner)
    whole_epoch(reference, optimizers[0], losses=(wide_square, later))
    with model.join():
        for step in range(batches_of(rank)):
            optimizers[1].zero_grad()
            with model.no_sync():
                wide_square(model, rank, step).backward()
            x = batch(rank, step, 6, 10).double().requires_grad_()
            torch.autograd.grad(model(x).sum(), x)
            model.eval()
            model(batch(rank, step, 2, 10).double())
            model.train()
            later(model, rank, step).backward()
            optimizers[1].step()
    check(inner, reference)


@scenario
def uneven_buffers():
    """Statistics of BatchNorm become those of the last ranks, whether they are broadcast in each step or not."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for broadcast in (True, False):
        model = seeded(lambda: nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double())
        outer = DistributedDataParallel(model, broadcast_buffers=broadcast)
        with outer.join():
            for step in range(batches_of(rank)):
                wide_square(model, rank, step).backward()
        check_identical(model)
        theirs = model[1].running_mean.clone()
        bagua.broadcast(theirs, max(range(n), key=batches_of))
        torch.testing.assert_close(model[1].running_mean, theirs, rtol=0, atol=0)
        assert int(model[1].num_batches_tracked) == most(n)


@scenario
def uneven_models():
    """Two models, whose passes come in an order of their own, as in adversarial training."""
    rank = bagua.get_rank()
    references = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    models = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        wrap(model, optimizer)
    whole_epoch(references[0], sgd(references[0]))
    plain, n = sgd(references[1]), bagua.get_world_size()
    for step in range(most(n)):
        for part in (1, 2):
            plain.zero_grad()
            for other in range(n):
                if step < batches_of(other):
                    (wide_square(references[1], other, 10 * part + step) / n).backward()
            plain.step()
    with bagua.join(models):
        for step in range(batches_of(rank)):
            for part, number in enumerate((0, 1, 1)):
                optimizers[number].zero_grad()
                wide_square(models[number], rank, 10 * part + step).backward()
                optimizers[number].step()
    for model, reference in zip(models, references, strict=True):
        check(model, reference)


@scenario
def uneven_with_codecs():
    """Algorithms that exchange gradients in another form: a rank without batches keeps all others right, too."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for name, arguments in (
        ("bytegrad", {}),
        ("power_sgd", {"rank": 2, "start_after": 2}),
        ("top_k", {"density": 0.25}),
        ("gradient_allreduce", {"codec": "int4"}),
    ):
        model = seeded(lambda: nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 4)))
        optimizer = sgd(model)
        model.with_bagua([optimizer], Algorithm.init(name, **arguments))
        before = [parameter.clone() for parameter in model.parameters()]
        with model.bagua_ddp.join(False):
            for step in range(2 * batches_of(rank)):
                optimizer.zero_grad()
                model(batch(rank, step, 6, 10)).square().mean().backward()
                optimizer.step()
        check_identical(model)
        moved = [not torch.equal(mine, other) for mine, other in zip(model.parameters(), before, strict=True)]
        assert all(moved) or n == 1
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@scenario
def uneven_ends_early():
    """throw_on_early_termination: all ranks raise, in torch's ``Join`` in its words, and may go on."""
    n, model = bagua.get_world_size(), seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    for error, words, join in (
        (BaguaError, "no batches are left on rank 1", model.bagua_ddp.join),
        (RuntimeError, "exhausted", functools.partial(Join, [model.bagua_ddp])),
    ):
        expected = pytest.raises(error, match=words) if n > 1 else contextlib.nullcontext()
        with expected, join(throw_on_early_termination=True):
            epoch(model, optimizer)
        with join(enable=False):
            wide_square(model, bagua.get_rank(), 0).backward()
        assert model.bagua_ddp.shadow.uneven is None


@scenario
def uneven_refusals():
    def normed():
        return nn.Sequential(nn.Linear(4, 4), bagua.contrib.SyncBatchNorm(4))

    for models, words in ((seeded(wide_mlp), "no wrapped model"), ([], "at least one model")):
        with pytest.raises(ConfigError, match=words):
            bagua.join(models)
    local_sgd = Algorithm.init("local_sgd")
    for make, optimizer, algorithm, options, words in (
        (wide_mlp, sgd, local_sgd, {}, "exchanges weights"),
        (wide_mlp, sgd, None, {"step_in_backward": True}, "step_in_backward"),
        (wide_mlp, lambda model: torch.optim.LBFGS(model.parameters()), None, {}, "LBFGS"),
        (normed, sgd, None, {}, "SyncBatchNorm"),
    ):
        model = seeded(make)
        model.with_bagua([optimizer(model)], algorithm, **options)
        with pytest.raises(ConfigError, match=words), bagua.join(model):
            pass
        with pytest.raises(ConfigError, match=words), Join([model.bagua_ddp]):
            model(torch.ones(2, 4 if make is normed else 10, dtype=next(model.parameters()).dtype))
        model.bagua_ddp.close()
    model = wrap(seeded(wide_mlp))
    with bagua.join(model, throw_on_early_termination=True), pytest.raises(ConfigError, match="nest"):
        with bagua.join(model, throw_on_early_termination=True):
            pass


@scenario
def uneven_out_of_step():
    """Active ranks that do different things hear of it, on all ranks."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    if n == 1:
        return
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    with pytest.raises(BaguaError, match="do different things"), model.bagua_ddp.join():
        with model.bagua_ddp.no_sync() if rank == 0 else contextlib.nullcontext():
            wide_square(model, rank, 0)


@scenario
def uneven_tuned():
    """Buckets are cut anew as long as all ranks have batches, and results are the same."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(wide_mlp), seeded(wide_mlp)
    optimizers = sgd(reference), sgd(model)
    tuner = functools.partial(Alternating, -1)
    ddp = BaguaDistributedDataParallel(model, [optimizers[1]], GradientAllReduceAlgorithm(), tuner=tuner)
    steps = [6 + batches_of(one) for one in range(n)]
    for step in range(max(steps)):
        optimizers[0].zero_grad()
        for other in range(n):
            if step < steps[other]:
                (wide_square(reference, other, step) / n).backward()
        optimizers[0].step()
    cuts = set()
    with ddp.join():
        for step in range(steps[rank]):
            optimizers[1].zero_grad()
            wide_square(model, rank, step).backward()
            optimizers[1].step()
            cuts.add(len(ddp.bagua_buckets))
    assert len(cuts) > 1
    check(model, reference)
    ddp.close()


def zero_optimizer():
    """Imported late: its package warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


@scenario
def uneven_in_torch_join():
    """A model in ``Join``, alone and before an optimizer whose steps are shadowed, too; with accumulation."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for by_initial, beside in ((False, False), (True, True)):
        reference, inner = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
        plain, model = adam(reference), DistributedDataParallel(inner)
        kind = zero_optimizer() if beside else None
        optimizer = kind(inner.parameters(), torch.optim.Adam, lr=0.01) if kind else adam(inner)
        for _ in range(2 if beside else 1):
            whole_epoch(reference, plain, lambda active: n if by_initial else active, (wide_square, later))  # noqa: B023
            listed = [model, optimizer] if beside else [model]
            with Join(listed, divide_by_initial_world_size=by_initial):
                for step in range(batches_of(rank)):
                    optimizer.zero_grad()
                    with model.no_sync():
                        wide_square(model, rank, step).backward()
                    later(model, rank, step).backward()
                    optimizer.step()
            check(inner, reference)
        assert model.inner.shadow.uneven is None
