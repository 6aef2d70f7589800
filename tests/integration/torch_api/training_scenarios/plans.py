"""Plans of several steps on buckets of gradients and of weights; models with plans of their own."""

import os

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua.torch_api as bagua
from bagua.algorithms import Algorithm, AlgorithmImpl, AllReduce, Broadcast, Local, Plan
from bagua.algorithms.plan import GRADIENT, HOST, LEADERS, RESULT, WEIGHT
from bagua.base.errors import BaguaError
from training_scenarios.support import batch, check_close, check_identical, compare, mlp, scenario, seeded, sgd, square


class PlanImpl(AlgorithmImpl):
    """Gives every bucket the same plan. Plans of weights run after each step of the last optimizer."""

    def __init__(self, group, made):
        super().__init__(group)
        self.exchanged, self.made, self.reset = made.exchanged, made, False

    def need_reset(self):
        reset, self.reset = self.reset, False
        return reset

    def init_operations(self, ddp, bucket):
        for name in self.made.slots:
            bucket.add_slot(name)
        bucket.set_plan(Plan(tuple(self.made.steps)))

    def init_post_optimizer_step_hook(self, ddp):
        def after_step(optimizer):
            if self.exchanged == WEIGHT and optimizer is ddp.bagua_optimizers[-1]:
                for bucket in ddp.bagua_buckets:
                    bucket.start()
                ddp.join()

        return after_step


class PlanAlgorithm(Algorithm):
    def __init__(self, *steps, exchanged=GRADIENT, slots=(), impl=PlanImpl):
        self.steps, self.exchanged, self.slots, self.impl = steps, exchanged, slots, impl

    def reify(self, group):
        return self.impl(group, self)


BY_LEVELS = (
    AllReduce("SUM", GRADIENT, RESULT, over=HOST),
    AllReduce("SUM", RESULT, RESULT, over=LEADERS),
    Broadcast(RESULT, over=HOST),
)
MEAN = AllReduce("AVG", WEIGHT, WEIGHT)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        square(model, bagua.get_rank(), step).backward()
        optimizer.step()


class Twice(nn.Module):
    """The first layer computes twice, as long as ``repeat`` says so."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.repeat = nn.Linear(10, 10), nn.Linear(10, 10), True

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in [self.first, self.second, self.first] if self.repeat else [self.first, self.second]:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
        return x


@scenario
def a_second_gradient_in_one_pass():
    """Where a plan changes state it can't be repeated: buckets wait for the end of backward if the first pass shows
    that this is needed, and all ranks are told if a later one does."""

    def algorithm():
        count = Local(lambda bucket: bucket.slot("passes").add_(1), writes=("passes",))
        return PlanAlgorithm(count, AllReduce(), slots=["passes"])

    model = compare(Twice, algorithm=algorithm(), steps=2)
    assert all(bool((bucket.slot("passes") == 2).all()) for bucket in model.bagua_buckets)
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = seeded(Twice).with_bagua([], algorithm())
    model.repeat = False
    square(model, rank, 0).backward()
    model.repeat = rank == n - 1
    if len(model.bagua_buckets) > 1:
        with pytest.raises(BaguaError, match="second gradient"):
            square(model, rank, 1).backward()
    model.bagua_ddp.close()


@scenario
def several_models_at_once():
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
def pending_when_the_model_is_unwrapped():
    """One rank began what the others never will, on a communicator of the algorithm's own: nobody waits for ever."""

    class Own(PlanImpl):
        def init_operations(self, ddp, bucket):
            own = ddp.own_communicator()
            bucket.set_plan(Plan((AllReduce("AVG", WEIGHT, WEIGHT, over=lambda: own),)))

    rank, model = bagua.get_rank(), seeded(mlp)
    optimizer = sgd(model)
    for how in ("again", "reset", "close"):
        model.with_bagua([], PlanAlgorithm(exchanged=WEIGHT, impl=Own))
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
def groups_of_some_ranks():
    """Two halves train apart; whoever is no member is told."""
    rank, n = bagua.get_rank(), bagua.get_world_size()
    if n < 2:
        return
    halves = [list(range(n // 2)), list(range(n // 2, n))]
    mine, others = halves if rank in halves[0] else halves[::-1]
    group, other = map(bagua.communication.new_group, (mine, others))
    for process_group, error, words in ((other, BaguaError, "no member"), (mine, TypeError, "process_group is a list")):
        with pytest.raises(error, match=words):
            seeded(mlp).with_bagua([], PlanAlgorithm(AllReduce()), process_group=process_group)
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
def algorithm_by_environment():
    def plans():
        return seeded(mlp).with_bagua([]).bagua_buckets[0].plan

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("BAGUA_ALGORITHM", raising=False)
        assert plans() == Plan((AllReduce("AVG"),))
        patch.setenv("BAGUA_ALGORITHM", "gradient_allreduce:average=false,codec=fp16")
        assert plans() == Plan((AllReduce("SUM", codec="fp16"),))
        given = seeded(mlp).with_bagua([], PlanAlgorithm(AllReduce()))
        assert given.bagua_buckets[0].plan == Plan((AllReduce("AVG"),))
        n = bagua.get_world_size()
        for text, words in (
            ("zip", "No algorithm"),
            ("gradient_allreduce:speed=1", "speed"),
            ("a:b", "BAGUA_ALGORITHM"),
            ("gradient_allreduce:codec=int4", "settings differ"),
        )[: 3 + (n > 1)]:
            os.environ["BAGUA_ALGORITHM"] = text if bagua.get_rank() == n - 1 else "gradient_allreduce:codec=fp16"
            with pytest.raises((BaguaError, ValueError), match=words):
                seeded(mlp).with_bagua([])
    with pytest.raises((TypeError, BaguaError), match="class PlanAlgorithm"):
        seeded(mlp).with_bagua([], PlanAlgorithm)


@scenario
def exception_in_backward_while_weights_travel():
    """The exchange that had begun is ended, and the next step is like any other."""

    class Early(PlanImpl):
        def init_forward_pre_hook(self, ddp):
            return lambda _: [bucket.start() for bucket in ddp.bagua_buckets]

        def init_post_backward_hook(self, ddp):
            return ddp.join

        def init_post_optimizer_step_hook(self, ddp):
            return lambda _: None

    def fail(gradient):
        raise ArithmeticError("on purpose")

    rank = bagua.get_rank()
    model = seeded(mlp).with_bagua([], PlanAlgorithm(MEAN, exchanged=WEIGHT, impl=Early))
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
