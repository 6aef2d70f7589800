"""A rank of an elastic job is killed in the middle of a backward pass, while the others do what programs do with
gradients: the pass is repeated without it, and the results are those of one process."""

import os
import signal

import pytest
import torch
from habits.case import Plain, batch_of, mlp
from rig.ranks.engine_hosts import make_ranks

import bagua.torch_api as bagua

LOSS = 3
"""The step in which rank 2 of three is killed."""


class Of:
    """Stands in for a way with this number of ranks."""

    def __init__(self, size):
        self.size = size


def square(net, x):
    return net(x).square().mean()


def two_passes(net, x):
    """The loss of a step: half of the gradient of a pass without sync, and a pass that is exchanged."""
    return 0.5 * square(net, x) + square(net, 2 * x)


def clip(net):
    for one in net.parameters():
        one.grad.data = one.grad.data.clamp(-0.05, 0.05)


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def rank_trains(replace):
    """Whether gradients that were kept stay, and, at the end, whether weights are those of one process."""
    bagua.init_process_group()
    rank = bagua.get_rank()
    net, optimizer = mlp()
    plain = Plain(Of(3), net)
    model = net.with_bagua([optimizer])
    kept = []
    for number in range(7):
        optimizer.zero_grad()
        x = batch_of(rank, number)
        with model.bagua_ddp.no_sync():
            square(model, x).backward()
        kept += [(one.grad.detach(), one.grad.clone()) for one in net.parameters()]
        for one in net.parameters():
            if replace == "grad":
                one.grad = one.grad * 0.5
            else:
                one.grad.data = one.grad.data * 0.5
        if number == LOSS:
            plain.ranks = range(2)
            if rank == 2:
                net[0].weight.register_hook(die)
        square(model, 2 * x).backward()
        clip(net)
        kept += [(one.grad.detach(), one.grad.clone()) for one in net.parameters()]
        optimizer.step()
        plain.step(two_passes, number, clip)
    return [all(torch.equal(*pair) for pair in kept), plain.agrees(net)]


@pytest.mark.parametrize("replace", ["grad", "grad.data"])
def test_a_rank_is_lost_while_gradients_are_kept_and_replaced(tmp_path, replace):
    with make_ranks(tmp_path) as ranks:
        started = ranks.start(rank_trains, 3, elastic=True, replace=replace)
        ranks.wait(60.0)
        assert started[2].process.returncode == -signal.SIGKILL
        assert [one.result() for one in started[:2]] == [[True, True]] * 2
