"""Steps that programs make in other ways than one call of the model in training mode and one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.one_bit_adam import OneBitAdamOptimizer
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.algorithms.zero_one_adam import ZeroOneAdamOptimizer
from bagua.torch_api.data_parallel import DistributedDataParallel
from bagua.torch_api.job.session import current
from training_scenarios.support import batch, check_identical, mlp, scenario, seeded, square, wrap


@scenario
def two_forward_passes() -> None:
    """Of a model whose buffers are sent before each of them."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    (model(torch.randn(8, 4)) - model(torch.randn(8, 4))).mean().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())


@scenario
def the_forward_pass_decides_what_is_exchanged() -> None:
    """As under torch's DDP, wherever backward is called."""
    rank = bagua.get_rank()
    for inside in (True, False):
        net = seeded(mlp)
        model = wrap(net, slow_sgd(net.parameters()))
        for step in range(3):
            net.zero_grad()
            block = model.bagua_ddp.no_sync()
            if inside:
                with block:
                    loss = square(model, rank, step)
                loss.backward()
            else:
                loss = square(model, rank, step)
                with block:
                    loss.backward()
            mine = torch.cat([one.grad.flatten() for one in net.parameters()])
            every = torch.empty(bagua.get_world_size(), mine.numel())
            bagua.allgather(mine, every)
            assert torch.equal(every[0], every[1]) != inside, (inside, step)


class LossAndOutputs(nn.Module):
    """Returns a loss and the outputs that it follows from, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layer(inputs)
        return {"loss": outputs.square().mean(), "outputs": outputs}


@scenario
def weighted_batches_whose_outputs_depend_on_each_other() -> None:
    """Each gradient is weighted once, by the weight at the begin of its pass: also where the model is called on its own
    output, where a method is called, and where the weight changes in the pass."""
    session, rank = current(), bagua.get_rank()
    weights = [0.5 + one for one in range(bagua.get_world_size())]
    for step in range(4):
        if step % 2 == 0:
            net = seeded(LossAndOutputs)
            model = wrap(net, slow_sgd(net.parameters()))
        wanted = torch.zeros(4, 4)
        for one, weight in enumerate(weights):
            first = batch(one, step, 3, 4) @ net.layer.weight.T
            loss = (first @ net.layer.weight.T).square().mean()
            wanted += weight / len(weights) * torch.autograd.grad(loss, net.layer.weight)[0]
        session.weigh_batch(weights[rank])
        try:
            call = model if step < 2 else net.layer
            first = call(batch(rank, step, 3, 4))
            if step < 2:
                first = first["outputs"]
                first.register_hook(lambda _: session.weigh_batch(9.0))
            second = call(first)
            (second["loss"] if step < 2 else second.square().mean()).backward()
        finally:
            session.weigh_batch(1.0)
        torch.testing.assert_close(net.layer.weight.grad, wanted)
        net.layer.weight.grad = None


@scenario
def interrupted_at_the_end_of_a_pass() -> None:
    """Ctrl-C while a rank waits for results: the next pass says that ranks are out of step, and no later one takes
    results of this one for its own."""
    net, connection, rank = seeded(mlp), current().connection, bagua.get_rank()
    model = wrap(net, slow_sgd(net.parameters()))
    for step in range(2):
        square(model, rank, step).backward()
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(*_: Any) -> Any:
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(connection, "wait_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            square(model, rank, 2).backward()
    if bagua.get_world_size() > 1:
        with pytest.raises(BaguaError, match="BG604"):
            square(model, rank, 3).backward()
    net.zero_grad()
    square(model, rank, 4).backward()
    mine = [parameter.grad for parameter in net.parameters()]
    wanted = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for one in range(bagua.get_world_size()):
        for total, part in zip(wanted, torch.autograd.grad(square(net, one, 4), list(net.parameters())), strict=True):
            total += part / bagua.get_world_size()
    torch.testing.assert_close(mine, wanted)


class Losses(nn.Module):
    """Its loss is a method, and its call the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def loss(self, rank: int, step: int) -> torch.Tensor:
        return square(self.layers, rank, step)

    forward = loss


Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def of_adam(kind: Callable[..., torch.optim.Optimizer], **arguments: int) -> Make:
    return lambda parameters: kind(parameters, lr=0.01, **arguments)


def slow_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


ALGORITHMS: dict[str, tuple[dict[str, Any], Make]] = {
    "gradient_allreduce": ({}, slow_sgd),
    "decentralized": ({"hierarchical": False}, slow_sgd),
    "low_precision_decentralized": ({}, slow_sgd),
    "local_sgd": ({"interval": 2, "warmup_steps": 3}, slow_sgd),
    "top_k": ({"warmup_steps": 3}, slow_sgd),
    "power_sgd": ({"start_after": 3}, slow_sgd),
    "qadam": ({}, of_adam(QAdamOptimizer, warmup_steps=3)),
    "one_bit_adam": ({}, of_adam(OneBitAdamOptimizer, warmup_steps=3)),
    "zero_one_adam": ({}, of_adam(ZeroOneAdamOptimizer, var_freeze_step=3)),
}


@scenario
def methods_and_evaluation_mode() -> None:
    """Training that calls a method, or the model in evaluation mode, ends with the bits of training that calls the
    model in training mode: warm-ups end in the same step, and weights travel in each."""
    rank = bagua.get_rank()
    for name, (arguments, make) in ALGORITHMS.items():
        ends = []
        for how in ("call", "method", "evaluation"):
            model = seeded(Losses)
            optimizer = make(model.parameters())
            model.with_bagua([optimizer], Algorithm.init(name, **arguments)).train(how != "evaluation")
            for step in range(8):
                optimizer.zero_grad()
                if how == "method" and rank == 0:  # a derivative that one rank alone looks at
                    torch.autograd.grad(model.loss(rank, step), list(model.parameters()))
                (model.loss if how == "method" else model)(rank, step).backward()
                optimizer.step()
            assert model.bagua_ddp.bagua_train_step_counter == 8
            ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert all(torch.equal(one, ends[0]) for one in ends[1:]), name


@scenario
def asynchronous_by_method() -> None:
    """The warm-up ends, and averages are applied."""
    rank = bagua.get_rank()
    model = seeded(Losses)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.with_bagua([optimizer], Algorithm.init("async", sync_interval_ms=0, warmup_steps=3))
    for step in range(100):
        model.loss(rank, step).backward()
        optimizer.step()
        bagua.barrier()
    assert model.bagua_algorithm.exchanged == "weight"
    assert bagua.get_world_size() == 1 or model.bagua_algorithm.rounds > 0


@scenario
def other_tensors_in_the_model() -> None:
    """``functional_call`` with tensors that are no parameters of the model is no change of it, in any step, and what is
    registered anywhere else is none either."""
    rank = bagua.get_rank()
    model = wrap(seeded(mlp))
    for step in range(12):
        model.zero_grad()
        kept = nn.Linear(3, 3)
        copies = {name: nn.Parameter(one.detach().clone()) for name, one in model.named_parameters()}
        output = torch.func.functional_call(model, copies, (batch(rank, step, 6, 10),))
        output.square().mean().backward()
        assert all(one.grad is None for one in model.parameters()) and kept.weight.grad is None
    square(model, rank, 0).backward()
    check_identical(model)


@scenario
def replaced_and_trained_by_a_method() -> None:
    """Not one parameter that was there has a gradient, and no pass of the model begins: the optimizer's step tells."""
    model = seeded(Losses)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrap(model, optimizer)
    model.layers = seeded(mlp)
    model.loss(bagua.get_rank(), 0).backward()
    with pytest.raises(BaguaError, match=r"Parameter layers\..* is trained now.*\[BG602\]"):
        optimizer.step()
