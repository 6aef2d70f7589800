"""Collectives that gradients flow through: values, gradients and second gradients."""

import pytest
import torch
from rig.ranks import placing
from rig.ranks.faults import kill_self
from torch.autograd import gradcheck, gradgradcheck

import bagua.torch_api as bagua
from bagua.base.errors import MembershipChanged
from bagua.torch_api.data_parallel.functional import all_gather, all_reduce, all_to_all, reduce_scatter

N = 3
COUNTS = [[0, 2, 1], [1, 0, 3], [2, 2, 0]]  # rows from rank i to rank j


class Mine(torch.autograd.Function):
    """The block of this rank of a tensor that is the same on all ranks. Together with ``Everyones`` it makes one
    function of all ranks' inputs and outputs out of a collective, so that finite differences see what other ranks
    get. Each is the gradient of the other."""

    @staticmethod
    def forward(context, everything):
        return everything[bagua.get_rank()].clone()

    @staticmethod
    def backward(context, gradient):
        return Everyones.apply(gradient)


class Everyones(torch.autograd.Function):
    @staticmethod
    def forward(context, mine):
        result = mine.new_empty(bagua.get_world_size(), *mine.shape)
        bagua.allgather(mine, result)
        return result

    @staticmethod
    def backward(context, gradient):
        return Mine.apply(gradient)


def check(collective, *shape):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(bagua.get_world_size(), *shape, dtype=torch.float64, generator=generator, requires_grad=True)

    def whole(everything):
        return Everyones.apply(collective(Mine.apply(everything)))

    assert gradcheck(whole, (inputs,))
    assert gradgradcheck(whole, (inputs,), fast_mode=True)  # each evaluation is an exchange


def padded(rows):
    """The same shape on all ranks."""
    return torch.cat([rows, rows.new_zeros(6 - len(rows), *rows.shape[1:])])


def rank_checks_gradients():
    me = bagua.get_rank()
    for op in (torch.distributed.ReduceOp.SUM, bagua.ReduceOp.AVG, bagua.ReduceOp.MAX):
        check(lambda mine, op=op: all_reduce(mine, op), 2)
    check(all_gather, 1, 2)
    check(all_gather)
    for op in (bagua.ReduceOp.SUM, bagua.ReduceOp.AVG):
        check(lambda mine, op=op: reduce_scatter(mine, op), N)
    check(all_to_all, N)
    gives, takes = COUNTS[me], [row[me] for row in COUNTS]
    check(lambda mine: padded(all_to_all(mine[: sum(gives)], gives)), 4, 1)
    check(lambda mine: padded(all_to_all(mine[: sum(gives)], gives, takes)), 4)


def test_gradients(pools):
    pools([0, 1], [2]).run(rank_checks_gradients)


def rank_computes():
    me = bagua.get_rank()
    mine = torch.arange(6.0).view(2, 3) + 10 * me
    assert all_gather(mine).tolist() == [row for rank in range(N) for row in (mine + 10 * (rank - me)).tolist()]
    whole = torch.arange(float(N)).view(N, 1)
    assert reduce_scatter(whole).tolist() == [[N * me]]
    assert reduce_scatter(whole, bagua.ReduceOp.AVG).tolist() == [[me]]
    rows = torch.tensor([[me * 10 + to, 0] for to in range(N) for _ in range(COUNTS[me][to])])
    found = all_to_all(rows, COUNTS[me])
    assert found[:, 0].tolist() == [10 * source + me for source in range(N) for _ in range(COUNTS[source][me])]
    assert all_to_all(torch.tensor([10 * me + to for to in range(N)])).tolist() == [10 * s + me for s in range(N)]
    assert all_to_all(rows[:0], [0] * N).shape == (0, 2)

    pair = bagua.communication.new_group([0, 2])
    for group in (pair, pair.get_global_communicator()):
        found = all_gather(torch.tensor([float(me)]), group)
        assert found.tolist() == ([me] if me == 1 else [0, 2])

    for call, words in (
        (lambda: reduce_scatter(torch.ones(N + 1)), "3 ranks can't share its first dimension"),
        (lambda: reduce_scatter(torch.ones(N), bagua.ReduceOp.MAX), "has no gradient here: choose one of SUM, AVG"),
        (lambda: all_reduce(torch.ones(N), bagua.ReduceOp.PRODUCT), "choose one of SUM, AVG, MIN, MAX"),
        (lambda: all_to_all(torch.ones(N), [1, 1]), "must be 3 whole numbers"),
        (lambda: all_to_all(torch.ones(N), [1, 1, 2]), "add up to 4 rows: tensor has 3"),
        (lambda: all_to_all(torch.ones(N), None, [1, 1, 1]), "pass both"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    bagua.barrier()


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_values_and_mistakes(pools, device):
    pools([0, 1], [2], environment=placing.environment(device, "staged")).run(rank_computes)


def rank_loses_one():
    bagua.init_process_group()
    mine = torch.full((2,), 1.0 + bagua.get_rank(), requires_grad=True)
    summed, gathered = all_reduce(mine * 2), all_gather(mine * 3)
    if bagua.get_rank() == 1:
        kill_self()
    summed.sum().backward()
    assert mine.grad is not None and mine.grad.tolist() == [4.0, 4.0]  # of the two that are left
    with pytest.raises(MembershipChanged, match="gradients can't go back"):
        gathered.sum().backward()
    gathered = all_gather(mine)
    if bagua.get_rank() == 0:
        kill_self()
    with pytest.raises(MembershipChanged, match="reduce_scatter is not repeated"):
        gathered.sum().backward()
    assert all_gather(mine).tolist() == mine.tolist()


def test_in_an_elastic_job(ranks):
    ranks.survive(rank_loses_one, (0, 1), 3)
