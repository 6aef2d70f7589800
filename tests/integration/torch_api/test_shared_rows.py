"""Rows that ranks of one host write into each other's memory."""

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.comm.communicators import communicator_of
from bagua.torch_api.comm.shared_rows import SharedRows
from bagua.torch_api.job.session import current

WIDTH = 5


def carried(counts, dtype=torch.float32):
    """Rank i sends ``counts[i][j]`` rows to rank j, full of 10 i + j."""
    comm = communicator_of(None)
    me, n = comm.rank(), comm.nranks()
    like = torch.empty(0, WIDTH, dtype=dtype)
    begins = [sum(counts[me][:rank]) for rank in range(n)]

    def write(begin, _, target):
        goes_to = next(rank for rank in range(n) if begins[rank] == begin and counts[me][rank])
        target.fill_(10 * me + goes_to)

    arrive = [sum(row[rank] for row in counts) for rank in range(n)]
    gives = [[(begins[rank], counts[me][rank])] for rank in range(n)]
    lands = [[sum(row[rank] for row in counts[:me])] for rank in range(n)]
    found = SharedRows(current(), comm).carry(gives, lands, arrive, like, write)
    wanted = [10.0 * rank + me for rank in range(n) for _ in range(counts[rank][me])]
    assert found[:, 0].tolist() == wanted and found.dtype == dtype
    assert bool((found == found[:, :1]).all())


def rank_carries():
    """Sizes that grow and shrink: segments are given back, and peers map others."""
    me, session = bagua.get_rank(), current()
    for number, rows in enumerate((1, 40, 3000, 2, 9000, 0, 3000, 5)):
        carried([[rows + 7 * i + j + 1 for j in range(3)] for i in range(3)])
        carried([[0, rows + 1, 0], [0, 0, 0], [2, 0, number + 3]], torch.float64)
    private, lent = session.connection.alloc(4096), session.connection.alloc(4096, for_peers=True)
    ids = torch.zeros(3, 2, dtype=torch.int64)
    ids[me] = torch.tensor([private.id, lent.id])
    bagua.allreduce_inplace(ids)
    peer = (me + 1) % 3
    session.connection.borrow(peer, int(ids[peer, 1]))
    with pytest.raises(CommunicationError, match="has made no segment"):
        session.connection.borrow(peer, int(ids[peer, 0]))
    with pytest.raises(CommunicationError, match="not in the generation"):
        session.connection.borrow(7, 1)
    bagua.barrier()
    session.connection.free(lent.id)
    bagua.barrier()
    with pytest.raises(CommunicationError, match="or has freed it"):
        session.connection.borrow(peer, int(ids[peer, 1]))
    with pytest.raises(BaguaError, match=r"rank 0: float32, rank 1: float64"):
        SharedRows(session, communicator_of(None)).meet(torch.float64 if me == 1 else torch.float32)


def test_rows_arrive(pools):
    pools([0, 1, 2]).run(rank_carries)


def rank_repeats():
    """All tokens go to one rank, more than it has offered room for; and a graph is used twice."""
    layer = bagua.moe.MoE(WIDTH, nn.Linear(WIDTH, WIDTH), capacity_factor=100.0)
    with torch.no_grad():
        layer.bagua_moe.gate.wg.weight[1] = 0.0
        layer.bagua_moe.gate.wg.weight[0] = 1.0
    for tokens in (4, 300, 8):
        inputs = torch.rand(tokens, WIDTH, requires_grad=True)
        found, _, counts = layer(inputs)
        assert counts.tolist() == [tokens, 0]
        found.sum().backward(retain_graph=True)
        assert inputs.grad is not None
        once = inputs.grad.clone()
        found.sum().backward()
        torch.testing.assert_close(inputs.grad, 2 * once)


def test_repeated(pools):
    pools([0, 1]).run(rank_repeats)
