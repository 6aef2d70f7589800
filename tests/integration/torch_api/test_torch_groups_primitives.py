"""Primitives on communicators of groups: members communicate, others' calls return at once, methods are the same."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.communication import (
    CommMember,
    _bagua_backend_comm,
    _rank_not_in_comm,
    _rank_not_in_group,
    allreduce_coalesced_inplace,
    alltoall_v,
    alltoall_v_inplace,
    broadcast_coalesced,
    broadcast_object,
    get_communicator,
    new_group,
)

DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8", "int16", "bool"]
TRIO = (0, 1, 3)


def check_methods(comm: Any) -> None:
    """Every method of a communicator of TRIO against what it must give."""
    me, n = comm.rank(), comm.nranks()
    mine = torch.full((2,), float(me + 1))
    blocks = torch.arange(6.0) + 10 * me

    def found(method: str, tensor: torch.Tensor, *more: int) -> list[float]:
        getattr(comm, method)(tensor, *more)
        values: list[float] = tensor.tolist()
        return values

    out2, out6 = torch.zeros(2), torch.zeros(6)
    comm.allreduce(mine, out2, bagua.ReduceOp.SUM)
    assert out2.tolist() == [6, 6]
    assert found("allreduce_inplace", mine.clone(), int(bagua.ReduceOp.MAX)) == [3, 3]
    assert found("broadcast", mine.clone(), 1) == [2, 2]
    out2.zero_()
    comm.reduce(mine, out2, 2, bagua.ReduceOp.SUM)
    assert out2.tolist() == ([6, 6] if me == 2 else [0, 0])
    assert found("reduce_inplace", mine.clone(), 0, bagua.ReduceOp.SUM) == ([6, 6] if me == 0 else mine.tolist())
    comm.allgather(mine, out6)
    assert out6.tolist() == [1, 1, 2, 2, 3, 3]
    own = torch.zeros(6)
    own[2 * me : 2 * me + 2] = mine
    assert found("allgather_inplace", own) == [1, 1, 2, 2, 3, 3]
    out6.zero_()
    comm.gather(mine, out6, 1)
    assert out6.tolist() == ([1, 1, 2, 2, 3, 3] if me == 1 else [0] * 6)
    own = torch.zeros(6) if me == 1 else mine.clone()
    own[2 * me : 2 * me + 2] = mine if me == 1 else own[2 * me : 2 * me + 2]
    comm.gather_inplace(own, 2, 1)
    assert own.tolist() == ([1, 1, 2, 2, 3, 3] if me == 1 else mine.tolist())
    comm.scatter(blocks, out2, 2)
    assert out2.tolist() == [20 + 2 * me, 21 + 2 * me]
    own = blocks.clone() if me == 2 else torch.zeros(2)
    comm.scatter_inplace(own, 2, 2)
    assert me == 2 or own.tolist() == [20 + 2 * me, 21 + 2 * me]
    comm.reduce_scatter(blocks, out2, bagua.ReduceOp.SUM)
    assert out2.tolist() == [30 + 6 * me, 33 + 6 * me]
    own = blocks.clone()
    comm.reduce_scatter_inplace(own, bagua.ReduceOp.SUM)
    assert own[2 * me : 2 * me + 2].tolist() == [30 + 6 * me, 33 + 6 * me]
    swapped = [10 * other + 2 * me + i for other in range(n) for i in range(2)]
    comm.alltoall(blocks, out6)
    assert out6.tolist() == swapped
    own = blocks.clone()
    comm.alltoall_inplace(own)
    assert own.tolist() == swapped
    comm.alltoall_v(blocks, [2, 2, 2], [0, 2, 4], out6.zero_(), [2, 2, 2], [0, 2, 4])
    assert out6.tolist() == swapped
    own = blocks.clone()
    comm.alltoall_v_inplace(own, [2, 2, 2], [0, 2, 4])
    assert own.tolist() == swapped
    if me == 0:
        comm.send(blocks, 2)
    if me == 2:
        comm.recv(out6, 0)
        assert out6.tolist() == [0, 1, 2, 3, 4, 5]
    comm.barrier()


def check_outside(comm: Any) -> None:
    """On a process that is no member nothing happens, whatever the arguments."""
    assert not comm and _rank_not_in_comm(comm) and _bagua_backend_comm(comm) is None
    assert comm is CommMember.NON_COMM_MEMBER and not comm.check_abort()
    tensor, wrong = torch.ones(3), torch.ones(100)
    for method in ("allreduce_inplace", "allgather_inplace", "alltoall_inplace", "reduce_scatter_inplace", "broadcast"):
        getattr(comm, method)(tensor)
    for method in ("allreduce", "allgather", "alltoall", "reduce_scatter"):
        getattr(comm, method)(tensor, wrong)
    for method in ("reduce", "gather", "scatter"):
        getattr(comm, method)(tensor, wrong, 7)
    comm.send(tensor, 1)
    comm.recv(tensor, 1)
    comm.reduce_inplace(tensor, 0)
    comm.gather_inplace(tensor, 1, 0)
    comm.scatter_inplace(tensor, 1, 0)
    comm.alltoall_v(tensor, [], [], wrong, [], [])
    comm.alltoall_v_inplace(tensor, [], [])
    comm.barrier()
    broadcast_coalesced([tensor], 0, comm)
    allreduce_coalesced_inplace([tensor], comm=comm)
    assert broadcast_object("mine", 0, comm) == "mine"
    assert tensor.tolist() == [1, 1, 1]


def check_alltoall_v(dtype: str) -> None:
    """Rank i sends i + j elements to rank j, some of them in the middle of a longer, non-contiguous tensor."""
    me, n = bagua.get_rank(), 4
    counts = [me + other for other in range(n)]
    displs = [2 + sum(counts[:other]) for other in range(n)]
    values = torch.arange(40).remainder(2 if dtype == "bool" else 100).to(getattr(torch, dtype))
    source = torch.stack([values + me if dtype != "bool" else values, values], 1)[:, 0]
    target = torch.full((2, 20), 1, dtype=source.dtype).t()
    wanted = target.reshape(-1).clone()
    for other in range(n):
        begin = 2 + sum(other + before for before in range(me))
        sent = (values + other if dtype != "bool" else values)[begin : begin + other + me]
        wanted[displs[other] : displs[other] + counts[other]] = sent
    alltoall_v(source, [*counts, 99], [*displs, 99], target, [*counts, -1], [*displs, -1])
    assert torch.equal(target.reshape(-1), wanted), dtype


def check_wrong_blocks() -> None:
    """All of these are seen before anything is sent."""
    four, t = [1, 1, 1, 1], torch.zeros(4)
    apart = [0, 1, 2, 3]
    for counts, displs, words in (
        (four[:3], apart, "counts has 3 entries"),
        (four, apart[:3], "displs has 3 entries"),
        ([1, 1, 1, 2], apart, "do not lie in"),
        ([1, 1, -1, 1], apart, "do not lie in"),
        (four, [0, 1, 1, 3], "ranks 1 and 2 overlap"),
    ):
        with pytest.raises(ValueError, match=words):
            alltoall_v_inplace(t, counts, displs)
    with pytest.raises(TypeError, match="whole number"):
        alltoall_v_inplace(t, [1.0, 1, 1, 1], apart)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="must agree"):
        alltoall_v(t, four, apart, t.double(), four, apart)
    with pytest.raises(ValueError, match="to itself"):
        alltoall_v(t, [2, 2, 2, 2], [0] * 4, t, four, apart)


class NoPickle:
    def __reduce__(self) -> Any:
        raise ArithmeticError("on purpose")


def check_objects() -> None:
    me = bagua.get_rank()
    sent = {"name": "tensor", "value": torch.arange(5), "long": "x" * 300_000}
    got = broadcast_object(sent if me == 2 else [me] * me, 2)
    assert got["name"] == "tensor" and torch.equal(got["value"], torch.arange(5)) and len(got["long"]) == 300_000
    assert broadcast_object(None) is None
    with pytest.raises(ArithmeticError if me == 1 else CommunicationError, match="on purpose"):
        broadcast_object(NoPickle() if me == 1 else 1, 1)


def check_coalesced() -> None:
    me = bagua.get_rank()

    def tensors(rank: int) -> list[torch.Tensor]:
        return [
            torch.full((3, 4), float(rank)).t(),
            torch.full((5,), rank, dtype=torch.int32),
            torch.zeros(0),
            torch.tensor(rank * 1.5),
            torch.full((2, 2), rank, dtype=torch.bfloat16),
            torch.full((1,), rank, dtype=torch.float64, requires_grad=True),
        ]

    mine = tensors(me)
    broadcast_coalesced(mine, 3)
    assert all(torch.equal(a, b) for a, b in zip(mine, tensors(3), strict=True))
    mine = tensors(me)
    allreduce_coalesced_inplace(mine, bagua.ReduceOp.SUM)
    assert all(torch.equal(a, b) for a, b in zip(mine, tensors(6), strict=True))
    mine = tensors(me)
    allreduce_coalesced_inplace(mine, bagua.ReduceOp.MAX)
    assert all(torch.equal(a, b) for a, b in zip(mine, tensors(3), strict=True))
    with pytest.raises(TypeError, match="complex"):
        broadcast_coalesced([torch.zeros(1), torch.zeros(1, dtype=torch.complex64)])
    with pytest.raises(TypeError, match="BAND"):
        allreduce_coalesced_inplace([torch.zeros(1)], bagua.ReduceOp.BAND)


def check_abort() -> None:
    """An aborted communicator ends on all members; the others go on."""
    group = new_group([1, 2])
    comm = group.get_global_communicator()
    if comm:
        comm.allreduce_inplace(torch.ones(1))
        assert not comm.check_abort()
        comm.abort()
        comm.abort()
        assert comm.check_abort()
        with pytest.raises(CommunicationError, match="was aborted"):
            comm.allreduce_inplace(torch.ones(1))
        with pytest.raises(CommunicationError, match="was aborted"):
            bagua.barrier(comm)
    bagua.barrier()


def rank_everything() -> None:
    bagua.init_process_group()
    me = bagua.get_rank()
    trio = new_group(TRIO)
    assert trio.ranks == list(TRIO) and _rank_not_in_group(trio) == (me == 2) and not _rank_not_in_group()
    comm = trio.get_global_communicator()
    assert get_communicator(trio.group_name, "global") is comm
    (check_outside if me == 2 else check_methods)(comm)
    assert comm.device_id() == bagua.get_local_rank() and comm.cuda_stream == 0
    assert _bagua_backend_comm() is _bagua_backend_comm(CommMember.WORLD)
    bagua.barrier(CommMember.WORLD)
    for dtype in DTYPES:
        check_alltoall_v(dtype)
    check_wrong_blocks()
    check_objects()
    check_coalesced()
    check_abort()
    with pytest.raises(TypeError, match="pass a communicator"):
        bagua.barrier("world")  # type: ignore[arg-type]
    bagua.barrier()
    bagua.destroy_process_group()
    with pytest.raises(BaguaError, match="init_process_group"):
        bagua.barrier(comm if comm else None)


@pytest.mark.parametrize("hosts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]]], ids=["one host", "two hosts"])
def test_primitives_on_groups(ranks: Any, hosts: list[list[int]]) -> None:
    ranks.run(rank_everything, hosts=hosts)


def rank_aborts_alone() -> str:
    """Rank 1 aborts a communicator, goes on with another one and leaves; rank 0 waits in the first one meanwhile."""
    bagua.init_process_group()
    first, second = new_group().get_global_communicator(), new_group().get_global_communicator()
    if bagua.get_rank() == 1:
        first.abort()
        bagua.barrier(second)
        return ""
    bagua.barrier(second)
    with pytest.raises(CommunicationError) as told:
        first.barrier()
    return str(told.value)


def test_a_member_that_goes_on_alone_is_told_when_the_other_leaves(ranks: Any) -> None:
    assert "rank 1" in ranks.run(rank_aborts_alone, 2)[0]


def rank_unequal_blocks() -> str:
    bagua.init_process_group()
    me = bagua.get_rank()
    with pytest.raises(CommunicationError) as told:
        alltoall_v(torch.zeros(4), [1, 2], [0, 1], torch.zeros(8), [1, 3] if me == 0 else [2, 2], [0, 3])
    return str(told.value)


def test_blocks_that_do_not_fit_name_both_ranks(ranks: Any) -> None:
    for text in ranks.run(rank_unequal_blocks, 2):
        assert "rank 0" in text and "rank 1" in text


def test_objects_of_these_tests_can_be_pickled() -> None:
    with pytest.raises(ArithmeticError):
        pickle.dumps(NoPickle())
