"""Plans of several steps on buckets of gradients and of weights, by algorithms that are written here."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, AlgorithmImpl, AllReduce, Broadcast, BucketLayout, Local, Neighbours, Plan
from bagua.algorithms.plan import GRADIENT, HOST, LEADERS, RESULT, WEIGHT, Step
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.communication import statistics
from bagua.torch_api.data_parallel import BaguaDistributedDataParallel
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


class PlanImpl(AlgorithmImpl):
    """Gives every bucket the same plan. Plans of weights run after each step of the last optimizer."""

    def __init__(self, group: Any, made: PlanAlgorithm) -> None:
        super().__init__(group)
        self.exchanged = made.exchanged
        self.made = made
        self.reset = self.closed = False

    def need_reset(self) -> bool:
        reset, self.reset = self.reset, False
        return reset

    def init_operations(self, ddp: Any, bucket: Any) -> None:
        for name in self.made.slots:
            bucket.add_slot(name)
        bucket.set_plan(Plan(tuple(self.made.steps)))

    def init_post_optimizer_step_hook(self, ddp: Any) -> Callable[[torch.optim.Optimizer], None]:
        def after_step(optimizer: torch.optim.Optimizer) -> None:
            if self.exchanged == WEIGHT and optimizer is ddp.bagua_optimizers[-1]:
                for bucket in ddp.bagua_buckets:
                    bucket.start()
                ddp.join()

        return after_step

    def close(self) -> None:
        self.closed = True


class PlanAlgorithm(Algorithm):
    def __init__(self, *steps: Step, exchanged: str = GRADIENT, slots: Sequence[str] = ()) -> None:
        self.steps, self.exchanged, self.slots = steps, exchanged, slots

    def reify(self, group: Any) -> PlanImpl:
        return PlanImpl(group, self)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        square(model, bagua.get_rank(), step).backward()
        optimizer.step()


def reference_of_means(steps: range, make: Callable[[], nn.Module] = mlp) -> list[nn.Module]:
    """All ranks' models in one process, each with its own optimizer; weights become the mean after each step."""
    models = [seeded(make) for _ in range(bagua.get_world_size())]
    optimizers = [sgd(model) for model in models]
    for step in steps:
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            square(model, rank, step).backward()
            optimizer.step()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models), strict=True):
                mean = torch.stack(list(same)).mean(0)
                for parameter in same:
                    parameter.copy_(mean)
    return models


BY_LEVELS = (
    AllReduce("SUM", GRADIENT, RESULT, over=HOST),
    AllReduce("SUM", RESULT, RESULT, over=LEADERS),
    Broadcast(RESULT, over=HOST),
)
MEAN = AllReduce("AVG", WEIGHT, WEIGHT)


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
        model.load_state_dict(torch.load(saved))
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other)
        impl = model.bagua_algorithm
        model.bagua_ddp.close()
        assert impl.closed
        train(model, optimizer, range(1))  # an ordinary model again


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
                bucket.slot(WEIGHT).copy_(torch.linspace(rank + step, rank + step + 1, bucket.elements))
                bucket.start()
            model.bagua_ddp.join()
            for bucket in model.bagua_buckets:
                for name, other in (("own", rank), ("left", (rank - 1) % n), ("right", (rank + 1) % n)):
                    wanted = torch.linspace(other + step, other + step + 1, bucket.elements)
                    wanted = wanted * 0 if n == 1 and name != "own" else wanted
                    error = {None: 0.0, "minmax8": 1 / 255, "fp16": 4e-3}[codec]
                    torch.testing.assert_close(bucket.slot(name), wanted, rtol=0, atol=error)


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
            bucket.slot(WEIGHT).fill_(rank)
            bucket.start()
        model.bagua_ddp.join()
        wanted = rank if communicator is None else sum(communicator.ranks) / 2
        assert all(bool((bucket.slot(WEIGHT) == wanted).all()) for bucket in model.bagua_buckets)


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
    model.with_bagua([], PlanAlgorithm(MEAN, exchanged=WEIGHT), do_flatten=False)
    bucket = model.bagua_buckets[0]
    with pytest.raises(BaguaError, match="do_flatten=True"):
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
