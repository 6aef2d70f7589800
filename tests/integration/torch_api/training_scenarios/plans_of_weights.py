"""Plans on buckets of weights: means, messages of neighbours, pairs that change."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import AllReduce, BucketLayout, Neighbours
from bagua.algorithms.plan import WEIGHT
from bagua.torch_api.communication import statistics
from bagua.torch_api.step.bucket import views_like
from training_scenarios.plan_algorithm import MEAN, PlanAlgorithm, PlanImpl, reference_of_means, train
from training_scenarios.support import (
    batch,
    check_identical,
    mlp,
    scenario,
    seeded,
    sgd,
    square,
)


@scenario
def means_of_weights() -> None:
    """After each step: the same as in one process, flat or not, and what is done to the model survives."""
    rank = bagua.get_rank()
    reference = reference_of_means(range(4))[rank]
    for flat in (True, False):
        model = seeded(mlp, seed=rank)
        optimizer = sgd(model)
        model.with_bagua([optimizer], PlanAlgorithm(MEAN, exchanged=WEIGHT), do_flatten=flat)
        train(model, optimizer, range(2))
        saved, twin = io.BytesIO(), copy.deepcopy(pickle.loads(pickle.dumps(model)))
        torch.save(model.state_dict(), saved)
        train(model, optimizer, range(2, 3))
        twin_before = [parameter.detach().clone() for parameter in twin.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():  # as load_state_dict(assign=True) or model.to() might do
                parameter.data = parameter.data.clone()
        train(model, optimizer, range(3, 4))
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
        check_identical(model)
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), twin_before, strict=True))
        saved.seek(0)
        model.load_state_dict(torch.load(saved, weights_only=True))
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)
        impl = model.bagua_algorithm
        model.bagua_ddp.close()
        assert impl.closed
        train(model, optimizer, range(1))  # an ordinary model again


@scenario
def exchanges_of_weights_are_steps_in_the_statistics() -> None:
    model = seeded(mlp)
    optimizer = sgd(model)
    model.with_bagua(optimizer, PlanAlgorithm(MEAN, exchanged=WEIGHT))
    before = statistics()
    train(model, optimizer, range(3))
    after = statistics()
    assert after.steps == before.steps + 3 and after.bytes_local > before.bytes_local
    assert after.comm_seconds > before.comm_seconds and after.last_step.step_seconds > 0


@scenario
def exception_in_backward_while_weights_travel() -> None:
    """The exchange that had begun is ended, and the next step is like any other."""

    class Early(PlanImpl):
        def init_forward_pre_hook(self, ddp: Any) -> Callable[[Any], None]:
            return lambda _: [bucket.start() for bucket in ddp.bagua_buckets]

        def init_post_backward_hook(self, ddp: Any) -> Callable[[], None]:
            return ddp.join

        def init_post_optimizer_step_hook(self, ddp: Any) -> Callable[[torch.optim.Optimizer], None]:
            return lambda _: None

    class EarlyAlgorithm(PlanAlgorithm):
        def reify(self, group: Any) -> PlanImpl:
            return Early(group, self)

    def fail(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    rank = bagua.get_rank()
    model = seeded(mlp).with_bagua([], EarlyAlgorithm(MEAN, exchanged=WEIGHT))
    with torch.no_grad():
        model[0].weight.add_(rank)
    output = model(batch(rank, 0, 6, 10))
    if rank == 0:
        output.register_hook(fail)
        with pytest.raises(ArithmeticError):
            output.sum().backward()
    else:
        output.sum().backward()
    square(model, rank, 1).backward()
    check_identical(model)


@scenario
def weights_of_every_kind() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(10, 12, dtype=torch.float64)
            self.b = nn.Linear(12, 12)
            self.c = nn.Linear(12, 10)
            self.c.weight = nn.Parameter(torch.randn(12, 10).t() * 0.1)  # not contiguous
            self.d = nn.Linear(10, 12)
            self.d.weight = nn.Parameter(torch.randn(12, 20).mul(0.1)[:, ::2])  # with gaps
            self.e = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            self.f = nn.Linear(12, 12)
            self.f.weight = self.b.weight  # shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.f(self.b(self.a(x.double()).float()))
            return self.d(self.c(x)) + self.e(torch.ones(1, 3, 3, 3)).mean()

    class One(PlanImpl):
        """All weights in one layout: it becomes a bucket for each dtype."""

        def tensors_to_buckets(self, tensors: Any, do_flatten: bool) -> list[BucketLayout]:
            return [BucketLayout("all", tuple(tensor for group in tensors for tensor in group))]

    class OneAlgorithm(PlanAlgorithm):
        def reify(self, group: Any) -> PlanImpl:
            return One(group, self)

    rank = bagua.get_rank()
    reference = reference_of_means(range(3), Odd)[rank]
    for flat in (True, False):
        model = seeded(Odd, seed=rank)
        optimizer = sgd(model)
        model.with_bagua([optimizer], OneAlgorithm(MEAN, exchanged=WEIGHT), do_flatten=flat)
        assert sorted(bucket.name for bucket in model.bagua_buckets) == ["all float32", "all float64"]
        assert model.e.weight.is_contiguous(memory_format=torch.channels_last)
        train(model, optimizer, range(3))
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        check_identical(model)


@scenario
def neighbours() -> None:
    """Messages of both neighbours, as they are and encoded."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for codec in (None, "minmax8", "fp16"):
        steps = (Neighbours(WEIGHT, "own", "left", "right", codec=codec),)
        model = seeded(mlp).with_bagua([], PlanAlgorithm(*steps, exchanged=WEIGHT, slots=["own", "left", "right"]))
        for step in range(2):
            for bucket in model.bagua_buckets:
                flat = torch.linspace(rank + step, rank + step + 1, bucket.elements)
                torch._foreach_copy_(bucket.views(WEIGHT), views_like(flat, bucket.tensors))
                bucket.start()
            model.bagua_ddp.join()
            for bucket in model.bagua_buckets:
                for name, other in (("own", rank), ("left", (rank - 1) % n), ("right", (rank + 1) % n)):
                    wanted = torch.linspace(other + step, other + step + 1, bucket.elements)
                    wanted = wanted * 0 if n == 1 and name != "own" else wanted
                    error = {None: 0.0, "minmax8": 1 / 255, "fp16": 4e-3}[codec]
                    torch.testing.assert_close(bucket.slot(name), wanted, rtol=0, atol=error)


@scenario
def over_a_function() -> None:
    """Pairs that change from step to step; an odd rank at the end has none."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    made: list[PlanImpl] = []
    moment = {"step": 0}

    def pair() -> Any:
        first = (rank + moment["step"]) // 2 * 2 - moment["step"]
        members = [other for other in (first, first + 1) if 0 <= other < n]
        return made[0].process_group.communicator(members) if len(members) == 2 else None

    model = seeded(mlp).with_bagua([], PlanAlgorithm(AllReduce("AVG", WEIGHT, WEIGHT, over=pair), exchanged=WEIGHT))
    made.append(model.bagua_algorithm)
    for step in range(3):
        moment["step"] = step % 2
        communicator = pair()
        for bucket in model.bagua_buckets:
            for weight in bucket.views(WEIGHT):
                weight.fill_(rank)
            bucket.start()
        model.bagua_ddp.join()
        wanted = rank if communicator is None else sum(communicator.ranks) / 2
        assert all(bool((weight == wanted).all()) for bucket in model.bagua_buckets for weight in bucket.views(WEIGHT))
