"""Steps that programs make in other ways than one call of the model in training mode and one backward pass."""

import contextlib
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms import Algorithm
from bagua.torch_api.algorithms.one_bit_adam import OneBitAdamOptimizer
from bagua.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua.torch_api.job.session import current
from training_scenarios.support import batch, check_close, compare, mlp, scenario, seeded, square, wrap


@scenario
def accumulation():
    for synced in ([False, False, True], [True, True, True], [True, False, True]):
        for average, set_to_none in itertools.product((True, False), repeat=2):
            compare(mlp, synced=synced, steps=3, average=average, set_to_none=set_to_none)


@scenario
def exception_in_backward():
    """Caught before anything was exchanged, it leaves no trace."""

    def fail(gradient):
        raise ArithmeticError("on purpose")

    rank, n = bagua.get_rank(), bagua.get_world_size()
    for whole in (True, False):
        reference, model = seeded(mlp), wrap(seeded(mlp))
        output = model(batch(rank, 0, 6, 10))
        output.register_hook(fail)  # comes after ours, by which the pass has begun
        with pytest.raises(ArithmeticError):
            output.sum().backward()
        (sum(square(reference, other, 1) for other in range(n)) / n).backward()
        if whole:
            square(model, rank, 1).backward()
        else:  # past the hooks of the model as a whole: its parameters alone tell that a pass begins
            x = batch(rank, 1, 6, 10)
            for layer in model:
                x = layer(x)
            x.square().mean().backward()
        check_close(model, reference)


@scenario
def the_forward_pass_decides_what_is_exchanged():
    """As under torch's DDP, wherever backward is called."""
    rank = bagua.get_rank()
    for inside in (True, False):
        net = seeded(mlp)
        model = wrap(net, slow_sgd(net.parameters()))
        for step in range(3):
            net.zero_grad()
            with model.bagua_ddp.no_sync() if inside else contextlib.nullcontext():
                loss = square(model, rank, step)
            with contextlib.nullcontext() if inside else model.bagua_ddp.no_sync():
                loss.backward()
            mine = torch.cat([one.grad.flatten() for one in net.parameters()])
            every = torch.empty(bagua.get_world_size(), mine.numel())
            bagua.allgather(mine, every)
            assert torch.equal(every[0], every[1]) != inside, (inside, step)


class LossAndOutputs(nn.Module):
    """Returns a loss and the outputs that it follows from, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        return {"loss": outputs.square().mean(), "outputs": outputs}


@scenario
def weighted_batches_whose_outputs_depend_on_each_other():
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
def interrupted_at_the_end_of_a_pass():
    """Ctrl-C while a rank waits for results: the next passes say that ranks are out of step, also where the program
    catches that. No pass of a model that is wrapped again takes results of this one for its own."""
    net, connection, rank = seeded(mlp), current().connection, bagua.get_rank()
    model = wrap(net, slow_sgd(net.parameters()))
    for step in range(2):
        square(model, rank, step).backward()
    with pytest.MonkeyPatch.context() as patch:

        def interrupted(*_):
            patch.undo()
            raise KeyboardInterrupt

        patch.setattr(connection, "wait_all", interrupted)
        with pytest.raises(KeyboardInterrupt):
            square(model, rank, 2).backward()
    for step in (3, 3) if bagua.get_world_size() > 1 else ():
        with pytest.raises(BaguaError, match="BG604"):
            square(model, rank, step).backward()
    model = wrap(net, slow_sgd(net.parameters()))
    net.zero_grad()
    square(model, rank, 4).backward()
    found = [parameter.grad for parameter in net.parameters()]
    n = bagua.get_world_size()
    loss = sum(square(net, one, 4) for one in range(n)) / n
    torch.testing.assert_close(found, list(torch.autograd.grad(loss, list(net.parameters()))))


class Losses(nn.Module):
    """Its loss is a method, and its call the same."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def loss(self, rank, step):
        return square(self.layers, rank, step)

    forward = loss


def slow_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


ALGORITHMS = {
    "gradient_allreduce": ({}, slow_sgd),
    "low_precision_decentralized": ({}, slow_sgd),
    "local_sgd": ({"interval": 2, "warmup_steps": 3}, slow_sgd),
    "power_sgd": ({"start_after": 3}, slow_sgd),
    "qadam": ({}, lambda parameters: QAdamOptimizer(parameters, lr=0.01, warmup_steps=3)),
    "one_bit_adam": ({}, lambda parameters: OneBitAdamOptimizer(parameters, lr=0.01, warmup_steps=3)),
}


@scenario
def state_that_one_rank_looks_at():
    """torch's ``get_optimizer_state_dict`` makes a step of an optimizer without state: no step of the training."""
    ends = []
    for looks in (False, True):
        model = seeded(mlp)
        optimizer = slow_sgd(model.parameters())
        model.with_bagua([optimizer], Algorithm.init("local_sgd", interval=2))
        for step in range(5):
            square(model, bagua.get_rank(), step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if looks and bagua.get_rank() == 0 and step % 2 == 0:
                get_optimizer_state_dict(model, optimizer)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(*ends)


@scenario
def methods_and_evaluation_mode():
    """Training that calls a method, or the model in evaluation mode, ends with the bits of training that calls the
    model in training mode: warm-ups end in the same step, and weights travel in each."""
    rank = bagua.get_rank()
    for name, (arguments, make) in ALGORITHMS.items():
        ends = []
        for how in ("call", "method", "evaluation", "derivative"):
            model = seeded(Losses)
            optimizer = make(model.parameters())
            model.with_bagua([optimizer], Algorithm.init(name, **arguments)).train(how != "evaluation")
            for step in range(6):
                optimizer.zero_grad()
                loss = (model.loss if how == "method" else model)(rank, step)
                if how in ("method", "derivative") and rank == 0:  # one that this rank alone looks at
                    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                loss.backward()
                optimizer.step()
            assert model.bagua_ddp.bagua_train_step_counter == 6
            ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        assert all(torch.equal(one, ends[0]) for one in ends[1:]), name
