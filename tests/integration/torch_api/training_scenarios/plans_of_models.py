"""Models with plans of their own: several at once, switched, unwrapped, in groups, with mistakes."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import AllReduce, Plan
from bagua.algorithms.plan import GRADIENT, WEIGHT
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.data_parallel import BaguaDistributedDataParallel
from training_scenarios.plan_algorithm import BY_LEVELS, MEAN, PlanAlgorithm, PlanImpl, train
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
def several_models_at_once() -> None:
    """One exchanges gradients and one weights, in an order of their own on each rank; optimizers of every kind."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    kinds = (
        lambda model: torch.optim.AdamW(model.parameters(), fused=True),
        lambda model: torch.optim.Adagrad(model.parameters(), foreach=True),
    )
    for make_optimizer in kinds:
        by_gradients, by_weights, reference = seeded(mlp, rank), seeded(mlp, rank), seeded(mlp)
        optimizers = [make_optimizer(model) for model in (by_gradients, by_weights, reference)]
        by_gradients.with_bagua([optimizers[0]], PlanAlgorithm(AllReduce()))
        by_weights.with_bagua([optimizers[1]], PlanAlgorithm(MEAN, exchanged=WEIGHT))
        for step in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [square(model, rank, step) for model in (by_gradients, by_weights)]
            for loss in losses if rank % 2 else losses[::-1]:
                loss.backward()
            (sum(square(reference, other, step) for other in range(n)) / n).backward()
            for optimizer in optimizers:
                optimizer.step()
        check_close(by_gradients, reference)
        check_identical(by_gradients)
        check_identical(by_weights)


@scenario
def settings_that_differ() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    if n == 1:
        return
    with pytest.raises(BaguaError, match=r"settings differ.*codec=Codec"):
        seeded(mlp).with_bagua([], GradientAllReduceAlgorithm(codec="int4" if rank == n - 1 else "fp16"))
    for optimizers in ([object()], [torch.optim.SGD]):
        with pytest.raises((TypeError, BaguaError), match="optimizers holds a"):
            seeded(mlp).with_bagua(optimizers if rank == n - 1 else [], PlanAlgorithm(AllReduce()))


@scenario
def reset_and_switched_again_and_again() -> None:
    """From gradients to weights and back: rank 0's parameters each time, and nothing is left behind."""
    rank = bagua.get_rank()
    model = seeded(mlp, seed=rank)
    optimizer = sgd(model)
    session = model.with_bagua([optimizer], PlanAlgorithm(AllReduce())).bagua_ddp._session
    seen = []
    for _ in range(4):
        for algorithm in (
            PlanAlgorithm(MEAN, exchanged=WEIGHT, slots=["more"]),
            PlanAlgorithm(AllReduce("AVG", codec="onebit")),
        ):
            with torch.no_grad():
                model[0].weight.add_(rank)
            model.with_bagua([optimizer], algorithm)
            check_identical(model)
            train(model, optimizer, range(2))
            impl = model.bagua_algorithm
            with torch.no_grad():
                model[0].weight.add_(rank)
            impl.reset = True
            square(model, rank, 0)
            check_identical(model)
            train(model, optimizer, range(2))
            impl.made = (
                PlanAlgorithm(MEAN, exchanged=WEIGHT) if impl.exchanged == GRADIENT else PlanAlgorithm(AllReduce())
            )
            impl.exchanged, impl.reset = impl.made.exchanged, True
            train(model, optimizer, range(2))
            check_identical(model)
        optimizer.zero_grad()
        gc.collect()
        session.memory.locate(torch.empty(1))  # forgets what has been given back
        descriptors = len(os.listdir("/proc/self/fd"))
        residuals = session.connection.counters()["residual_bytes"]
        seen.append((len(session.memory._segments), descriptors, threading.active_count(), residuals))
    assert seen[1:] == seen[:-1], seen


@scenario
def mistakes_in_plans() -> None:
    """Every rank gets the error, also where one alone made it."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = seeded(mlp)
    for step, words in (
        (AllReduce(dst="nowhere"), "no slot 'nowhere'"),
        (AllReduce(src=WEIGHT), "no slot 'weight'"),
    ):
        with pytest.raises((ValueError, BaguaError), match=words):
            model.with_bagua([], PlanAlgorithm(step))
        if n > 1:
            with pytest.raises((ValueError, BaguaError), match=words):
                model.with_bagua([], PlanAlgorithm(step if rank == n - 1 else AllReduce()))
    model.with_bagua([], PlanAlgorithm(MEAN, exchanged=WEIGHT))
    bucket = model.bagua_buckets[0]
    with pytest.raises(BaguaError, match="BG307"):
        bucket.slot(WEIGHT)
    with pytest.raises(ValueError, match="already"):
        bucket.add_slot(WEIGHT)
    bucket.start()
    with pytest.raises(BaguaError, match="twice"):
        bucket.start()
    bucket.join()
    bucket.join()
    assert bucket.done()
    model.bagua_ddp.close()
    with pytest.raises(BaguaError, match="can't run"):
        bucket.start()


@scenario
def pending_when_the_model_is_unwrapped() -> None:
    """One rank began what the others never will, on a communicator of the algorithm's own: nobody waits for ever."""
    rank = bagua.get_rank()

    class Own(PlanImpl):
        def init_operations(self, ddp: Any, bucket: Any) -> None:
            self.own = ddp.own_communicator()
            bucket.set_plan(Plan((AllReduce("AVG", WEIGHT, WEIGHT, over=lambda: self.own),)))

    class OwnAlgorithm(PlanAlgorithm):
        def reify(self, group: Any) -> PlanImpl:
            return Own(group, self)

    model = seeded(mlp)
    optimizer = sgd(model)
    for how in ("again", "reset", "close"):
        model.with_bagua([], OwnAlgorithm(exchanged=WEIGHT))
        if rank == 0:
            model.bagua_buckets[0].start()
        if how == "reset":
            model.bagua_algorithm.reset = True
            square(model, rank, 0)
        elif how == "close":
            model.bagua_ddp.close()
    model.with_bagua([optimizer], PlanAlgorithm(AllReduce()))
    train(model, optimizer, range(2))
    check_identical(model)


@scenario
def groups_of_some_ranks() -> None:
    """Two halves train apart; whoever is no member is told."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    if n < 2:
        return
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    mine = halves[0] if rank in halves[0] else halves[1]
    group = bagua.communication.new_group(mine)
    other = bagua.communication.new_group(halves[1] if mine is halves[0] else halves[0])
    with pytest.raises(BaguaError, match="no member"):
        seeded(mlp).with_bagua([], PlanAlgorithm(AllReduce()), process_group=other)
    with pytest.raises(TypeError, match="process_group is a list"):
        seeded(mlp).with_bagua([], PlanAlgorithm(AllReduce()), process_group=mine)
    for steps in ((AllReduce(),), BY_LEVELS):
        reference, model = seeded(mlp), seeded(mlp, seed=rank - mine[0])
        optimizers = sgd(reference), sgd(model)
        model.with_bagua([optimizers[1]], PlanAlgorithm(*steps), process_group=group)
        for step in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            total = sum(square(reference, one, step) for one in mine)
            (total / len(mine) if len(steps) == 1 else total).backward()
            square(model, rank, step).backward()
            check_close(model, reference)
            for optimizer in optimizers:
                optimizer.step()


@scenario
def algorithm_by_environment() -> None:
    n = bagua.get_world_size()

    def plans() -> Any:
        return seeded(mlp).with_bagua([]).bagua_buckets[0].plan

    before = os.environ.pop("BAGUA_ALGORITHM", None)
    assert plans() == Plan((AllReduce("AVG"),))
    try:
        os.environ["BAGUA_ALGORITHM"] = "gradient_allreduce:average=false,codec=fp16"
        assert plans() == Plan((AllReduce("SUM", codec="fp16"),))
        given = seeded(mlp).with_bagua([], PlanAlgorithm(AllReduce()))
        assert given.bagua_buckets[0].plan == Plan((AllReduce("AVG"),))
        for text, words in (
            ("zip", "No algorithm"),
            ("gradient_allreduce:speed=1", "speed"),
            ("a:b", "BAGUA_ALGORITHM"),
        ):
            os.environ["BAGUA_ALGORITHM"] = text if bagua.get_rank() == n - 1 else "gradient_allreduce"
            with pytest.raises((BaguaError, ValueError), match=words):
                seeded(mlp).with_bagua([])
    finally:
        os.environ.pop("BAGUA_ALGORITHM")
        if before is not None:
            os.environ["BAGUA_ALGORITHM"] = before
    with pytest.raises((TypeError, BaguaError), match="class PlanAlgorithm"):
        seeded(mlp).with_bagua([], PlanAlgorithm)


@scenario
def buffers_follow_rank_0() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7), nn.Linear(7, 2))

    rank = bagua.get_rank()
    model = seeded(make)
    wrapper = BaguaDistributedDataParallel(model, [], PlanAlgorithm(AllReduce()), broadcast_buffers=True)
    for step in range(3):
        model(batch(rank, step, 6, 10)).sum().backward()
    with wrapper.no_sync():
        model(batch(rank, 9, 6, 10)).sum().backward()
    model(batch(0, 10, 6, 10))  # rank 0's statistics, with the same batch added
    alone = seeded(make)
    for step in (0, 1, 2, 9, 10):
        alone(batch(0, step, 6, 10))
    for mine, other in zip(model.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(mine, other)
    wrapper.close()
