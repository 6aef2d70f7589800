"""Every primitive against what torch computes on one process: on all ranks, and as methods of communicators of groups,
for others than whose members calls return at once."""

import functools
import operator

import pytest
import torch
from rig.ranks.placing import device

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError, CommunicationError
from bagua.torch_api.comm.groups import _get_default_group
from bagua.torch_api.communication import (
    CommMember,
    _bagua_backend_comm,
    _rank_not_in_comm,
    _rank_not_in_group,
    allreduce_coalesced_inplace,
    alltoall_v,
    broadcast_coalesced,
    broadcast_object,
    get_communicator,
    new_group,
)

N = 4
DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8", "int16", "bool"]
TRIO = (0, 1, 3)


class World:
    """Calls the functions of the package, as methods of communicators are called."""

    def __getattr__(self, name):
        return getattr(bagua, name)

    def rank(self):
        return bagua.get_rank()

    def nranks(self):
        return N


def data(rank, shape, dtype):
    """The same on every rank for the same arguments: small whole numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 4, shape, generator=generator, device="cpu").to(device(), getattr(torch, dtype))


def expect(found, wanted, what):
    assert found.dtype == wanted.dtype, what
    assert torch.equal(found, wanted.reshape(found.shape)), f"{what}: {found} is not {wanted}"


def moves(comm, dtype):
    me, n = comm.rank(), comm.nranks()
    parts = [data(rank, (3, 5), dtype) for rank in range(n)]
    whole, blank, last = torch.cat(parts), torch.zeros_like(parts[0]), n - 1

    def own_block():
        found = torch.zeros_like(whole)
        found[3 * me : 3 * me + 3] = parts[me]
        return found

    def put(name, wanted, given, *more):
        """Of a method that puts its result elsewhere."""
        found = torch.zeros_like(wanted)
        getattr(comm, name)(given, found, *more)
        expect(found, wanted, f"{name} {dtype}")

    def change(name, wanted, given, *more):
        found = given.clone()
        getattr(comm, name)(found, *more)
        expect(found, wanted, f"{name} {dtype}")

    change("broadcast", parts[1], parts[me], 1)
    put("allgather", whole, parts[me])
    change("allgather_inplace", whole, own_block())
    put("gather", whole if me == 1 else torch.zeros_like(whole), parts[me], 1)
    change("gather_inplace", whole if me == last else parts[me], own_block() if me == last else parts[me], 15, last)
    put("scatter", parts[me], whole if me == 1 else torch.zeros_like(whole), 1)
    change("scatter_inplace", whole if me == 0 else parts[me], whole if me == 0 else blank, 15, 0)
    square = [data(rank, (n, 7), dtype) for rank in range(n)]
    swapped = torch.stack([square[other][me] for other in range(n)])
    put("alltoall", swapped, square[me])
    change("alltoall_inplace", swapped, square[me])
    counts, begins = [7] * n, [7 * rank for rank in range(n)]
    found = torch.zeros_like(swapped)
    comm.alltoall_v(square[me], counts, begins, found, counts, begins)
    expect(found, swapped, f"alltoall_v {dtype}")
    change("alltoall_v_inplace", swapped, square[me], counts, begins)
    if me == 0:
        comm.send(parts[0], last)
    if me == last:
        comm.recv(blank, 0)
        expect(blank, parts[0], f"send and recv {dtype}")
    comm.barrier()


def reduced(parts, op):
    stack = torch.stack(parts)
    wide = stack.to(torch.float64) if stack.dtype.is_floating_point else stack.to(torch.int64)
    result = {
        bagua.ReduceOp.SUM: lambda: wide.sum(0),
        bagua.ReduceOp.PRODUCT: lambda: wide.prod(0),
        bagua.ReduceOp.MIN: lambda: wide.amin(0),
        bagua.ReduceOp.MAX: lambda: wide.amax(0),
        bagua.ReduceOp.AVG: lambda: (
            wide.sum(0) / len(parts) if wide.dtype.is_floating_point else wide.sum(0) // len(parts)
        ),
        bagua.ReduceOp.BOR: lambda: functools.reduce(operator.or_, wide),
        bagua.ReduceOp.BAND: lambda: functools.reduce(operator.and_, wide),
        bagua.ReduceOp.BXOR: lambda: functools.reduce(operator.xor, wide),
    }[op]()
    return result.to(stack.dtype)


def reductions(comm, dtype):
    me, n, kind = comm.rank(), comm.nranks(), getattr(torch, dtype)
    for op in bagua.ReduceOp:
        if (kind.is_floating_point and op.name.startswith("B")) or (
            kind is torch.bool and op.name in ("SUM", "PRODUCT", "AVG")
        ):
            continue
        what = f"{op.name} {dtype}"
        parts = [data(rank, (n, 33), dtype) for rank in range(n)]
        wanted, nothing = reduced(parts, op), torch.zeros_like(parts[0])
        for name, after, target, more in (
            ("allreduce", wanted, nothing, ()),
            ("reduce", wanted if me == 2 else nothing, nothing, (2,)),
            ("reduce_scatter", wanted[me], nothing[0], ()),
        ):
            found = target.clone()
            getattr(comm, name)(parts[me], found, *more, op)
            expect(found, after, f"{name} {what}")
            expect(parts[me], data(me, (n, 33), dtype), f"input of {name} {what}")
        found = parts[me].clone()
        comm.allreduce_inplace(found, op)
        expect(found, wanted, f"allreduce_inplace {what}")
        found = parts[me].clone()
        comm.reduce_inplace(found, 1, op)
        expect(found, wanted if me == 1 else parts[me], f"reduce_inplace {what}")
        found = parts[me].clone()
        comm.reduce_scatter_inplace(found, op)
        expect(found[me], wanted[me], f"reduce_scatter_inplace {what}")


def rank_moves_and_reduces():
    for dtype in DTYPES:
        moves(World(), dtype)
        reductions(World(), dtype)


def rank_memory():
    """Tensors of all kinds of memory: of the daemon, with gaps, large, empty, leaves of autograd."""
    me = bagua.get_rank()
    wanted = sum(data(rank, (64, 50), "float32").double() for rank in range(N)).float()
    mine = data(me, (64, 50), "float32")

    shared = bagua.empty(64, 50)
    assert shared.dtype is torch.float32 and shared.shape == (64, 50) and not shared.any()
    shared.copy_(mine)
    for result in (bagua.empty((64, 50)), torch.zeros(64, 50)):
        bagua.allreduce(shared, result)
        expect(result, wanted, "memory of the daemon")
    bagua.allreduce_inplace(shared[16:32])
    expect(shared[16:32], wanted[16:32], "part of memory of the daemon")

    for gaps in (mine.t().contiguous().t(), mine.unsqueeze(2).expand(64, 50, 2)[:, :, 0]):
        target = torch.zeros(50, 64).t()
        bagua.allreduce(gaps, target)
        expect(target, wanted, "not contiguous")
    strided = torch.zeros(64, 100)
    strided[:, ::2] = mine
    bagua.allreduce_inplace(strided[:, ::2])
    expect(strided[:, ::2].contiguous(), wanted, "with gaps, in place")
    assert not strided[:, 1::2].any()
    square = torch.zeros(6, N).t()
    square[me] = me + 1
    bagua.allgather_inplace(square)
    assert square.tolist() == [[rank + 1] * 6 for rank in range(N)]

    large = torch.full((5_000_003,), float(me + 1))
    bagua.allreduce_inplace(large)
    assert torch.equal(large, torch.full_like(large, 10.0))
    if me < 2:
        (bagua.send if me == 0 else bagua.recv)(large.fill_(me), 1 - me)
        assert not large.any()
    large_shared = bagua.empty(5_000_003)
    large_shared.fill_(me + 1)
    bagua.allreduce_inplace(large_shared if me % 2 else large_shared.clone())
    bagua.broadcast(large_shared, 3)
    assert torch.equal(large_shared, torch.full_like(large_shared, 10.0))
    bagua.reduce_scatter(torch.full((5_000_004,), float(me)), block := torch.zeros(1_250_001))
    assert torch.equal(block, torch.full_like(block, 6.0))

    nothing, scalar = torch.zeros(0), torch.tensor(float(me))
    bagua.allreduce_inplace(nothing)
    bagua.broadcast(nothing, 1)
    bagua.allreduce_inplace(scalar, bagua.ReduceOp.MAX)
    assert scalar.item() == 3
    leaf = torch.nn.Parameter(torch.full((3,), float(me)))
    bagua.broadcast(leaf, 2)
    assert leaf.requires_grad and leaf.is_leaf and leaf.tolist() == [2, 2, 2]


def rank_mistakes():
    """Nothing is sent: the ranks are in step afterwards."""
    a, b = torch.zeros(2, 3), torch.zeros(7)
    four, apart, t = [1, 1, 1, 1], [0, 1, 2, 3], torch.zeros(4)
    for error, words, name, *arguments in (
        (ValueError, "must have equal sizes", "allreduce", a, b),
        (ValueError, "must be as 1 to 4", "allgather", a, b),
        (TypeError, "they must agree", "allreduce", a, a.double()),
        (ValueError, "7 elements .*4 ranks can't share equally", "alltoall", b, b),
        (ValueError, "7 elements .*4 ranks can't share equally", "reduce_scatter_inplace", b),
        (ValueError, "with count=5 this rank must pass", "gather_inplace", a, 5, 0),
        (ValueError, "count is 1.5", "scatter_inplace", a, 1.5, 0),
        (ValueError, "no dimension can be negative", "empty", 2, -1),
        (ValueError, "src is 4", "broadcast", a, 4),
        (ValueError, "dst is", "send", a, bagua.get_rank()),
        (TypeError, "view_as_real", "allreduce_inplace", a.to(torch.complex64)),
        (TypeError, "to_dense", "allreduce_inplace", a.to_sparse()),
        (TypeError, "tensor is a list", "allreduce_inplace", [1.0]),
        (TypeError, "reduced with BOR", "allreduce_inplace", a, bagua.ReduceOp.BOR),
        (ValueError, "5 is not a reduction", "allreduce_inplace", a, 5),
        (TypeError, "bool tensors can't be reduced with SUM", "allreduce_inplace", a.bool()),
        (TypeError, "device meta", "allreduce_inplace", a.to("meta")),
        (TypeError, "comm is a str", "allreduce_inplace", a, bagua.ReduceOp.SUM, "world"),
        (TypeError, "pass a communicator", "barrier", "world"),
        (ValueError, "counts has 3 entries", "alltoall_v_inplace", t, four[:3], apart),
        (ValueError, "displs has 3 entries", "alltoall_v_inplace", t, four, apart[:3]),
        (ValueError, "do not lie in", "alltoall_v_inplace", t, [1, 1, 1, 2], apart),
        (ValueError, "do not lie in", "alltoall_v_inplace", t, [1, 1, -1, 1], apart),
        (ValueError, "ranks 1 and 2 overlap", "alltoall_v_inplace", t, four, [0, 1, 1, 3]),
        (TypeError, "whole number", "alltoall_v_inplace", t, [1.0, 1, 1, 1], apart),
        (TypeError, "must agree", "alltoall_v", t, four, apart, t.double(), four, apart),
        (ValueError, "to itself", "alltoall_v", t, [2, 2, 2, 2], [0] * 4, t, four, apart),
    ):
        with pytest.raises(error, match=words):
            getattr(bagua, name)(*arguments)
    bagua.barrier()


def check_outside(comm):
    """On a process that is no member nothing happens, whatever the arguments."""
    assert not comm and _rank_not_in_comm(comm) and _bagua_backend_comm(comm) is None
    assert comm is CommMember.NON_COMM_MEMBER and not comm.check_abort()
    tensor, wrong = torch.ones(3), torch.ones(100)
    for names, arguments in (
        ("allreduce_inplace allgather_inplace alltoall_inplace reduce_scatter_inplace broadcast", (tensor,)),
        ("allreduce allgather alltoall reduce_scatter", (tensor, wrong)),
        ("reduce gather scatter", (tensor, wrong, 7)),
        ("send recv reduce_inplace", (tensor, 1)),
        ("gather_inplace scatter_inplace", (tensor, 1, 0)),
        ("alltoall_v_inplace", (tensor, [], [])),
        ("alltoall_v", (tensor, [], [], wrong, [], [])),
        ("barrier", ()),
    ):
        for name in names.split():
            getattr(comm, name)(*arguments)
    broadcast_coalesced([tensor], 0, comm)
    allreduce_coalesced_inplace([tensor], comm=comm)
    assert broadcast_object("mine", 0, comm) == "mine" and tensor.tolist() == [1, 1, 1]


def rank_trio():
    me = bagua.get_rank()
    trio = new_group(TRIO)
    assert trio.ranks == list(TRIO) and _rank_not_in_group(trio) == (me == 2) and not _rank_not_in_group()
    comm = trio.get_global_communicator()
    assert get_communicator(trio.group_name, "global") is comm
    if me == 2:
        check_outside(comm)
    else:
        moves(comm, "float32")
        reductions(comm, "float32")
    assert comm.device_id() == bagua.get_local_rank() and comm.cuda_stream == 0
    assert _bagua_backend_comm() is _bagua_backend_comm(CommMember.WORLD)
    bagua.barrier(CommMember.WORLD)

    # An aborted communicator ends on all members; the others go on.
    comm = new_group([1, 2]).get_global_communicator()
    if comm:
        comm.allreduce_inplace(torch.ones(1))
        assert not comm.check_abort()
        comm.abort()
        comm.abort()
        assert comm.check_abort()
        for call in (lambda: comm.allreduce_inplace(torch.ones(1)), lambda: bagua.barrier(comm)):
            with pytest.raises(CommunicationError, match="was aborted"):
                call()
    bagua.barrier()


def rank_sends_blocks():
    """Rank i sends i + j elements to rank j, some of them in the middle of a longer, non-contiguous tensor."""
    me, n = bagua.get_rank(), N
    for dtype in DTYPES:
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


class NoPickle:
    def __reduce__(self):
        raise ArithmeticError("on purpose")


def rank_sends_objects_and_lists():
    me = bagua.get_rank()
    sent = {"name": "tensor", "value": torch.arange(5), "long": "x" * 300_000}
    got = broadcast_object(sent if me == 2 else [me] * me, 2)
    assert got["name"] == "tensor" and torch.equal(got["value"], torch.arange(5)) and len(got["long"]) == 300_000
    assert broadcast_object(None) is None
    with pytest.raises(ArithmeticError if me == 1 else CommunicationError, match="on purpose"):
        broadcast_object(NoPickle() if me == 1 else 1, 1)

    def tensors(rank):
        return [
            torch.full((3, 4), float(rank)).t(),
            torch.full((5,), rank, dtype=torch.int32),
            torch.zeros(0),
            torch.tensor(rank * 1.5),
            torch.full((2, 2), rank, dtype=torch.bfloat16),
            torch.full((1,), rank, dtype=torch.float64, requires_grad=True),
        ]

    for call, argument, wanted in (
        (broadcast_coalesced, 3, 3),
        (allreduce_coalesced_inplace, bagua.ReduceOp.SUM, 6),
        (allreduce_coalesced_inplace, bagua.ReduceOp.MAX, 3),
    ):
        mine = tensors(me)
        call(mine, argument)
        assert all(torch.equal(a, b) for a, b in zip(mine, tensors(wanted), strict=True))
    with pytest.raises(TypeError, match="complex"):
        broadcast_coalesced([torch.zeros(1), torch.zeros(1, dtype=torch.complex64)])
    with pytest.raises(TypeError, match="BAND"):
        allreduce_coalesced_inplace([torch.zeros(1)], bagua.ReduceOp.BAND)


@pytest.mark.parametrize(
    "hosts", [pytest.param([[0, 1, 2, 3]], marks=pytest.mark.full), [[0, 1], [2, 3]]], ids=["one host", "two hosts"]
)
@pytest.mark.parametrize(
    "function",
    [rank_moves_and_reduces, rank_memory, rank_mistakes, rank_trio, rank_sends_blocks, rank_sends_objects_and_lists],
)
def test_primitives(pools, hosts, function):
    pools(*hosts).run(function)


def total(comm):
    """Sum of the global ranks of a communicator's members, by the communicator itself."""
    tensor = torch.tensor([float(bagua.get_rank())])
    bagua.allreduce_inplace(tensor, comm=comm)
    return tensor.item()


def rank_groups():
    me = bagua.get_rank()
    default = _get_default_group()
    assert default.ranks == [0, 1, 2, 3] and default.hosts == ((0, 1), (2, 3))
    assert default.get_global_communicator().id == 0 and _get_default_group() is default
    assert total(default.get_global_communicator()) == 6
    assert total(default.get_intra_node_communicator()) == (1 if me < 2 else 5)
    leaders = default.get_inter_node_communicator()
    assert bool(leaders) == (me in (0, 2)) and leaders.nranks() == (2 if me in (0, 2) else 0)
    if leaders:
        assert total(leaders) == 2
    if me in (1, 2):
        for _ in range(me):  # others' groups don't disturb: rank 0 has not made any of these
            new_group([me])
        pair = default.communicator([2, 1])
        assert pair is default.communicator((1, 2)) and pair.ranks == (1, 2) and pair.rank() == me - 1
        assert total(pair) == 3
        assert total(new_group([2, 1]).get_global_communicator()) == 3
    everyone = new_group()
    assert everyone.get_global_communicator().id != 0 and total(everyone.get_global_communicator()) == 6
    assert total(everyone.new_communicator()) == 6
    if me == 3:
        for call, words in (
            (lambda: new_group([0, 4]), "not a rank of this job"),
            (lambda: new_group([1, 1]), "once"),
            (lambda: default.communicator([0, 1]), "not among the members"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
    bagua.barrier()


def test_groups(pools):
    pools([0, 1], [2, 3]).run(rank_groups)


def rank_disagrees():
    """Ranks 0 and 1 call {0, 1} the group, rank 2 says {1, 2}: it asks rank 1 for what that will never give."""
    bagua.init_process_group()
    mine = new_group([1, 2] if bagua.get_rank() == 2 else [0, 1])
    bagua.barrier()
    if bagua.get_rank() < 2:
        assert total(mine.get_global_communicator()) == 1
        return ""
    with pytest.raises(BaguaError) as failed:
        total(mine.get_global_communicator())
    return str(failed.value)


def test_groups_that_ranks_of_a_host_see_differently(ranks):
    """The one that is alone with its view hears of it when the other one ends."""
    assert "rank 1" in ranks.run(rank_disagrees, 3)[2]
