"""Plans of several steps on buckets of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.algorithms import AllReduce, Local
from bagua.algorithms.plan import GRADIENT, RESULT
from bagua.base.errors import BaguaError
from training_scenarios.plan_algorithm import BY_LEVELS, PlanAlgorithm
from training_scenarios.support import (
    batch,
    check_close,
    check_identical,
    mlp,
    scenario,
    seeded,
    sgd,
    square,
)


@scenario
def gradients_by_levels() -> None:
    """Reduction inside the host, between leaders, and back: the same sum, and the same word of who has a gradient."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp, seed=rank)
    optimizers = sgd(reference), sgd(model)
    model.with_bagua([optimizers[1]], PlanAlgorithm(*BY_LEVELS))
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(square(reference, other, step) for other in range(n)).backward()
        square(model, rank, step).backward()
        check_close(model, reference)
        for optimizer in optimizers:
            optimizer.step()
    check_identical(model)

    # A layer that the last rank alone uses.
    model = seeded(mlp).with_bagua([], PlanAlgorithm(*BY_LEVELS))
    for _ in range(2):
        model.zero_grad()
        (model[4] if rank < n - 1 else model)(batch(rank, 0, 6, 24 if rank < n - 1 else 10)).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


@scenario
def gradients_with_computation_between() -> None:
    """Scaled before and after, through a slot of the algorithm's own."""

    def double(bucket: Any) -> None:
        torch.mul(bucket.slot(GRADIENT), 2, out=bucket.slot("work"))

    def halve(bucket: Any) -> None:
        torch.mul(bucket.slot("work"), 0.5, out=bucket.slot(RESULT))

    steps = (
        Local(double, reads=(GRADIENT,), writes=("work",)),
        AllReduce("AVG", "work", "work"),
        Local(halve, reads=("work",), writes=(RESULT,)),
    )
    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(mlp), seeded(mlp, seed=rank)
    optimizers = sgd(reference), sgd(model)
    model.with_bagua([optimizers[1]], PlanAlgorithm(*steps, slots=["work"]))
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (sum(square(reference, other, step) for other in range(n)) / n).backward()
        square(model, rank, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    check_close(model, reference)
    check_identical(model)


@scenario
def plans_without_a_result_leave_gradients_alone() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model, alone = seeded(mlp), seeded(mlp)
    model.with_bagua([], PlanAlgorithm(AllReduce("SUM", GRADIENT, "seen"), slots=["seen"]))
    for step in range(3):
        for one in (model, alone):
            one.zero_grad()
            square(one, rank, step).backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
        total = seeded(mlp)
        sum(square(total, other, step) for other in range(n)).backward()
        wanted = {name: parameter.grad for name, parameter in total.named_parameters()}
        for bucket in model.bagua_buckets:
            for name, view in zip(bucket.names, bucket.views("seen"), strict=True):
                torch.testing.assert_close(view, wanted[name], rtol=1e-4, atol=1e-5)


@scenario
def everywhere() -> None:
    """Ranks of one host encode, too: the result is within the codec's bound, and the same on all."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for codec in ("minmax8", "onebit", "topk"):
        algorithm = PlanAlgorithm(AllReduce("AVG", codec=codec, everywhere=True))
        model, exact = seeded(mlp).with_bagua([], algorithm), seeded(mlp)
        for step in range(2):
            for one in (model, exact):
                one.zero_grad()
            square(model, rank, step).backward()
            (sum(square(exact, other, step) for other in range(n)) / n).backward()
            for mine, other in zip(model.parameters(), exact.parameters(), strict=True):
                assert not torch.equal(mine.grad, other.grad), "nothing was encoded"
                if codec == "minmax8":
                    torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0.05 * float(other.grad.abs().max()))
        for parameter in model.parameters():
            everyone = torch.zeros(n, *parameter.shape)
            bagua.allgather(parameter.grad.contiguous(), everyone)
            assert bool((everyone == everyone[0]).all())


@scenario
def a_second_gradient_in_one_pass() -> None:
    """Where a plan changes state it can't be repeated: buckets wait for the end of backward if the first pass shows
    that this is needed, and all ranks are told if a later one does."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
            self.repeat = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            layers = [self.first, self.second, self.first] if self.repeat else [self.first, self.second]
            for layer in layers:
                x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
            return x

    def count(bucket: Any) -> None:
        bucket.slot("passes").add_(1)

    def algorithm() -> PlanAlgorithm:
        steps = (Local(count, writes=("passes",)), AllReduce())
        return PlanAlgorithm(*steps, slots=["passes"])

    rank, n = bagua.get_rank(), bagua.get_world_size()
    reference, model = seeded(Twice), seeded(Twice).with_bagua([], algorithm())
    for step in range(2):
        for one in (reference, model):
            one.zero_grad()
        (sum(square(reference, other, step) for other in range(n)) / n).backward()
        square(model, rank, step).backward()
        check_close(model, reference)
    assert all(bool((bucket.slot("passes") == 2).all()) for bucket in model.bagua_buckets)

    model = seeded(Twice).with_bagua([], algorithm())
    model.repeat = False
    square(model, rank, 0).backward()
    model.repeat = rank == n - 1
    if len(model.bagua_buckets) > 1:
        with pytest.raises(BaguaError, match="second gradient"):
            square(model, rank, 1).backward()
    model.bagua_ddp.close()
