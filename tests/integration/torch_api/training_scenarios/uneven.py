"""``join``: ranks with different numbers of batches, beside one process that trains on all of them."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

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
    check_identical,
    scenario,
    seeded,
    sgd,
    wide_mlp,
    wide_square,
    wrap,
)

EXACT = 1e-12


def batches_of(rank: int) -> int:
    """Rank 1 of several has none, and rank 0 fewer than the last."""
    return 2 if rank == 0 else 0 if rank == 1 else 3 + rank


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def most(n: int) -> int:
    return max(batches_of(rank) for rank in range(n))


def reference_step(
    model: nn.Module, step: int, n: int, divisor: Callable[[int], float], loss: Callable[..., torch.Tensor]
) -> None:
    active = [rank for rank in range(n) if step < batches_of(rank)]
    for rank in active:
        (loss(model, rank, step) / divisor(len(active))).backward()


@scenario
def uneven_batches() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for by_initial in (True, False):
        for average in (True, False):
            reference, model = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
            optimizers = sgd(reference), sgd(model)
            wrap(model, optimizers[1], average=average)
            divisor = (lambda active: n if by_initial else active) if average else (lambda active: 1)  # noqa: B023
            for epoch in range(2):  # the second begins where the state of optimizers is that of the last rank, too
                for step in range(most(n)):
                    optimizers[0].zero_grad()
                    reference_step(reference, step, n, divisor, wide_square)
                    optimizers[0].step()
                with bagua.join(model, divide_by_initial_world_size=by_initial):
                    for step in range(batches_of(rank)):
                        optimizers[1].zero_grad()
                        wide_square(model, rank, step).backward()
                        optimizers[1].step()
                check_identical(model)
                for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(mine, other, rtol=EXACT, atol=EXACT, msg=f"epoch {epoch}")
                # Outside of the block numbers are even again.
                for part, optimizer in ((reference, optimizers[0]), (model, optimizers[1])):
                    optimizer.zero_grad()
                    ranks = range(n) if part is reference else [rank]
                    for other in ranks:
                        share = n if average and part is reference else 1
                        (wide_square(part, other, 99) / share).backward()
                    optimizer.step()
                check_close(model, reference, EXACT)


@scenario
def uneven_accumulation_and_inference() -> None:
    """no_sync, evaluation between two steps, a pass that accumulates nothing, and DDP's own way to write it."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, inner = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
    model = DistributedDataParallel(inner)
    optimizers = sgd(reference), sgd(inner)
    for step in range(most(n)):
        optimizers[0].zero_grad()
        reference_step(reference, step, n, lambda _: n, wide_square)
        reference_step(reference, step, n, lambda _: n, lambda m, r, s: wide_square(m, r, 10 + s))
        optimizers[0].step()
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
            wide_square(model, rank, 10 + step).backward()
            optimizers[1].step()
    check_identical(inner)
    for mine, other in zip(inner.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=EXACT, atol=EXACT)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@scenario
def uneven_buffers() -> None:
    """Statistics of BatchNorm become those of the last ranks, whether they are broadcast in each step or not."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    last = max(range(n), key=lambda one: batches_of(one))
    for broadcast in (True, False):
        model = seeded(Normed)
        outer = DistributedDataParallel(model, broadcast_buffers=broadcast)
        with outer.join():
            for step in range(batches_of(rank)):
                wide_square(model, rank, step).backward()
        check_identical(model)
        found = model.inner[1].running_mean.clone()
        theirs = found.clone()
        bagua.broadcast(theirs, last)
        torch.testing.assert_close(found, theirs, rtol=0, atol=0)
        assert int(model.inner[1].num_batches_tracked) == most(n)


@scenario
def uneven_models() -> None:
    """Two models, whose passes come in an order of their own, as in adversarial training."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    references = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    models = [seeded(wide_mlp), seeded(wide_mlp, seed=1)]
    reference_optimizers = [sgd(model) for model in references]
    optimizers = [sgd(model) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        wrap(model, optimizer)
    order = (0, 1, 1)
    for step in range(most(n)):
        for part, number in enumerate(order):
            reference_optimizers[number].zero_grad()
            reference_step(
                references[number], step, n, lambda _: n, lambda m, r, s, part=part: wide_square(m, r, 10 * part + s)
            )
            reference_optimizers[number].step()
    with bagua.join(models):
        for step in range(batches_of(rank)):
            for part, number in enumerate(order):
                optimizers[number].zero_grad()
                wide_square(models[number], rank, 10 * part + step).backward()
                optimizers[number].step()
    for model, reference in zip(models, references, strict=True):
        check_identical(model)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=EXACT, atol=EXACT)


@scenario
def uneven_with_codecs() -> None:
    """Algorithms that exchange gradients in another form: a rank without batches keeps all others right, too."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    settings: list[tuple[str, dict[str, Any]]] = [
        ("bytegrad", {}),
        ("power_sgd", {"rank": 2, "start_after": 2}),
        ("top_k", {"density": 0.25}),
        ("gradient_allreduce", {"codec": "int4"}),
    ]
    for name, arguments in settings:
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
def uneven_ends_early() -> None:
    """throw_on_early_termination: all ranks raise, and may go on."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = seeded(wide_mlp)
    optimizer = sgd(model)
    wrap(model, optimizer)
    expected = pytest.raises(BaguaError, match="no batches are left on rank 1") if n > 1 else contextlib.nullcontext()
    with expected, model.bagua_ddp.join(throw_on_early_termination=True):
        for step in range(batches_of(rank)):
            optimizer.zero_grad()
            wide_square(model, rank, step).backward()
            optimizer.step()
    with model.bagua_ddp.join(enable=False):
        wide_square(model, rank, 0).backward()


@scenario
def uneven_refusals() -> None:
    model = seeded(wide_mlp)
    with pytest.raises(ConfigError, match="no wrapped model"):
        bagua.join(model)
    with pytest.raises(ConfigError, match="at least one model"):
        bagua.join([])
    for name, words in (("local_sgd", "exchanges weights"), ("decentralized", "exchanges weights")):
        model = seeded(wide_mlp)
        model.with_bagua([sgd(model)], Algorithm.init(name))
        with pytest.raises(ConfigError, match=words), bagua.join(model):
            pass
        model.bagua_ddp.close()
    model = seeded(wide_mlp)
    model.with_bagua([sgd(model)], GradientAllReduceAlgorithm(), step_in_backward=True)
    with pytest.raises(ConfigError, match="step_in_backward"), bagua.join(model):
        pass
    model.bagua_ddp.close()
    model = seeded(wide_mlp)
    wrap(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ConfigError, match="LBFGS"), bagua.join(model):
        pass
    model.bagua_ddp.close()
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), bagua.contrib.SyncBatchNorm(4)))
    wrap(model, sgd(model))
    with pytest.raises(ConfigError, match="SyncBatchNorm"), bagua.join(model):
        pass
    with bagua.join(model, throw_on_early_termination=True), pytest.raises(ConfigError, match="nest"):
        with bagua.join(model, throw_on_early_termination=True):
            pass


@scenario
def uneven_out_of_step() -> None:
    """Active ranks that do different things hear of it, on all ranks."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    if n == 1:
        return
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    with pytest.raises(BaguaError, match="do different things"), model.bagua_ddp.join():
        if rank == 0:
            with model.bagua_ddp.no_sync():
                wide_square(model, rank, 0)
        else:
            wide_square(model, rank, 0)


@scenario
def uneven_tuned() -> None:
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
    check_identical(model)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=EXACT, atol=EXACT)
    ddp.close()


def zero_optimizer() -> Any:
    """Imported late: its package warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer


@scenario
def uneven_in_torch_join() -> None:
    """A model in ``Join``, alone and before an optimizer whose steps are shadowed, too; with accumulation."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for by_initial, beside in ((True, False), (False, False), (True, True)):
        reference, inner = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
        plain = torch.optim.Adam(reference.parameters(), lr=0.01)
        model = DistributedDataParallel(inner)
        if beside:
            optimizer: Any = zero_optimizer()(inner.parameters(), torch.optim.Adam, lr=0.01)
        else:
            optimizer = torch.optim.Adam(inner.parameters(), lr=0.01)
        for epoch in range(2 if beside else 1):
            for step in range(most(n)):
                plain.zero_grad()
                divisor = lambda active: n if by_initial else active  # noqa: E731, B023
                reference_step(reference, step, n, divisor, wide_square)
                reference_step(reference, step, n, divisor, lambda m, r, s: wide_square(m, r, 10 + s))
                plain.step()
            listed = [model, optimizer] if beside else [model]
            with Join(listed, divide_by_initial_world_size=by_initial):
                for step in range(batches_of(rank)):
                    optimizer.zero_grad()
                    with model.no_sync():
                        wide_square(model, rank, step).backward()
                    wide_square(model, rank, 10 + step).backward()
                    optimizer.step()
            check_identical(inner)
            for mine, other in zip(inner.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=EXACT, atol=EXACT, msg=f"epoch {epoch}, {beside}")
        assert model.inner.shadow.uneven is None


@scenario
def uneven_in_torch_join_ends_early() -> None:
    """torch's words, on all ranks; without ``enable`` nothing is told."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = seeded(wide_mlp)
    wrap(model, sgd(model))
    expected = pytest.raises(RuntimeError, match="exhausted") if n > 1 else contextlib.nullcontext()
    with expected, Join([model.bagua_ddp], throw_on_early_termination=True):
        for step in range(batches_of(rank)):
            wide_square(model, rank, step).backward()
    with Join([model.bagua_ddp], enable=False):
        wide_square(model, rank, 0).backward()
    assert model.bagua_ddp.shadow.uneven is None
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), bagua.contrib.SyncBatchNorm(4)))
    wrap(model, sgd(model))
    with pytest.raises(ConfigError, match="SyncBatchNorm"), Join([model.bagua_ddp]):
        model(torch.ones(2, 4))
    model = seeded(wide_mlp)
    model.with_bagua([sgd(model)], Algorithm.init("local_sgd"))
    with pytest.raises(ConfigError, match="exchanges weights"):
        Join([model.bagua_ddp])


@scenario
def uneven_scaled() -> None:
    """GradScaler: an inf on one rank makes all ranks that have batches skip the step; the others take part."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    last = max(range(n), key=batches_of)
    spoilt = 1  # the step in which the last rank has an inf

    def loss(model: nn.Module, which: int, step: int) -> torch.Tensor:
        found = wide_square(model, which, step)
        return found * float("inf") if (which, step) == (last, spoilt) else found

    reference, model = seeded(wide_mlp), seeded(wide_mlp)
    optimizers = sgd(reference), sgd(model)
    scalers = torch.amp.GradScaler("cpu", init_scale=16.0), torch.amp.GradScaler("cpu", init_scale=16.0)
    wrap(model, optimizers[1])
    for step in range(most(n)):
        optimizers[0].zero_grad()
        reference_step(reference, step, n, lambda _: n, lambda *of: scalers[0].scale(loss(*of)))
        scalers[0].step(optimizers[0])
        scalers[0].update()
    with bagua.join(model):
        for step in range(batches_of(rank)):
            optimizers[1].zero_grad()
            scalers[1].scale(loss(model, rank, step)).backward()
            scalers[1].step(optimizers[1])
            scalers[1].update()
    check_identical(model)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=EXACT, atol=EXACT)
    if batches_of(rank) > spoilt:
        assert scalers[1].get_scale() == 8.0


@scenario
def uneven_fused() -> None:
    """``fuse_optimizer``: its state on all ranks is that of the last rank to have batches."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(wide_mlp), seeded(wide_mlp, seed=rank)
    plain, optimizer = adam(reference), bagua.contrib.fuse_optimizer(adam(model), do_flatten=True)
    wrap(model, optimizer)
    for epoch in range(2):
        for step in range(most(n)):
            plain.zero_grad()
            reference_step(reference, step, n, lambda _: n, wide_square)
            plain.step()
        with bagua.join(model):
            for step in range(batches_of(rank)):
                optimizer.zero_grad()
                wide_square(model, rank, step).backward()
                optimizer.fuse_step()
        check_identical(model)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=EXACT, atol=EXACT, msg=f"epoch {epoch}")
