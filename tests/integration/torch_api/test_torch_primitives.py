"""Every primitive against what torch computes on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rig.ranks.placing import device

import bagua.torch_api as bagua

N = 4
DTYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8", "int16", "bool"]


def data(rank: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The same on every rank for the same arguments: small whole numbers, exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(0, 4, shape, generator=generator, device="cpu").to(device(), getattr(torch, dtype))


def all_data(shape: tuple[int, ...], dtype: str) -> list[torch.Tensor]:
    return [data(rank, shape, dtype) for rank in range(N)]


def expect(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert found.dtype == wanted.dtype, what
    assert torch.equal(found, wanted.reshape(found.shape)), f"{what}: {found} is not {wanted}"


def rank_moves() -> None:
    bagua.init_process_group()
    me = bagua.get_rank()
    for dtype in DTYPES:
        parts = all_data((3, 5), dtype)
        blank = torch.zeros(3, 5, dtype=parts[0].dtype)
        tensor = parts[me].clone()
        bagua.broadcast(tensor, 2)
        expect(tensor, parts[2], f"broadcast {dtype}")

        gathered = torch.zeros(N * 3, 5, dtype=blank.dtype)
        bagua.allgather(parts[me], gathered)
        expect(gathered, torch.cat(parts), f"allgather {dtype}")
        whole = torch.zeros(N, 15, dtype=blank.dtype)
        whole[me] = parts[me].view(-1)
        bagua.allgather_inplace(whole)
        expect(whole, torch.cat(parts), f"allgather_inplace {dtype}")

        gathered.zero_()
        bagua.gather(parts[me], gathered, 1)
        expect(gathered, torch.cat(parts) if me == 1 else torch.zeros_like(gathered), f"gather {dtype}")
        whole = torch.zeros(N, 15, dtype=blank.dtype)
        whole[me] = parts[me].view(-1)
        own = whole if me == 3 else parts[me].clone()
        bagua.gather_inplace(own, 15, 3)
        expect(own, torch.cat(parts) if me == 3 else parts[me], f"gather_inplace {dtype}")

        everything = torch.cat(parts)
        received = blank.clone()
        bagua.scatter(everything if me == 1 else torch.zeros_like(everything), received, 1)
        expect(received, parts[me], f"scatter {dtype}")
        own = everything.clone() if me == 0 else blank.clone()
        bagua.scatter_inplace(own, 15, 0)
        expect(own, everything if me == 0 else parts[me], f"scatter_inplace {dtype}")

        square = all_data((N, 7), dtype)
        wanted = torch.stack([square[other][me] for other in range(N)])
        swapped = torch.zeros_like(square[me])
        bagua.alltoall(square[me], swapped)
        expect(swapped, wanted, f"alltoall {dtype}")
        swapped = square[me].clone()
        bagua.alltoall_inplace(swapped)
        expect(swapped, wanted, f"alltoall_inplace {dtype}")

        if me == 0:
            bagua.send(parts[0], 3)
        if me == 3:
            received = blank.clone()
            bagua.recv(received, 0)
            expect(received, parts[0], f"send and recv {dtype}")
        bagua.barrier()


def reduced(parts: list[torch.Tensor], op: bagua.ReduceOp) -> torch.Tensor:
    stack = torch.stack(parts)
    wide = stack.to(torch.float64) if stack.dtype.is_floating_point else stack.to(torch.int64)
    result = {
        bagua.ReduceOp.SUM: lambda: wide.sum(0),
        bagua.ReduceOp.PRODUCT: lambda: wide.prod(0),
        bagua.ReduceOp.MIN: lambda: wide.amin(0),
        bagua.ReduceOp.MAX: lambda: wide.amax(0),
        bagua.ReduceOp.AVG: lambda: wide.sum(0) / N if wide.dtype.is_floating_point else wide.sum(0) // N,
        bagua.ReduceOp.BOR: lambda: wide[0] | wide[1] | wide[2] | wide[3],
        bagua.ReduceOp.BAND: lambda: wide[0] & wide[1] & wide[2] & wide[3],
        bagua.ReduceOp.BXOR: lambda: wide[0] ^ wide[1] ^ wide[2] ^ wide[3],
    }[op]()
    return result.to(stack.dtype)


def rank_reductions() -> None:
    bagua.init_process_group()
    me = bagua.get_rank()
    for dtype in DTYPES:
        for op in bagua.ReduceOp:
            kind = getattr(torch, dtype)
            if kind.is_floating_point and op.name.startswith("B"):
                continue
            if kind is torch.bool and op.name in ("SUM", "PRODUCT", "AVG"):
                continue
            what = f"{op.name} {dtype}"
            parts = all_data((N, 33), dtype)
            wanted = reduced(parts, op)
            found = torch.zeros_like(parts[0])
            bagua.allreduce(parts[me], found, op)
            expect(found, wanted, f"allreduce {what}")
            expect(parts[me], data(me, (N, 33), dtype), f"input of allreduce {what}")
            found = parts[me].clone()
            bagua.allreduce_inplace(found, op)
            expect(found, wanted, f"allreduce_inplace {what}")

            found = torch.zeros_like(parts[0])
            bagua.reduce(parts[me], found, 2, op)
            expect(found, wanted if me == 2 else torch.zeros_like(found), f"reduce {what}")
            found = parts[me].clone()
            bagua.reduce_inplace(found, 1, op)
            expect(found, wanted if me == 1 else parts[me], f"reduce_inplace {what}")

            block = torch.zeros(33, dtype=kind)
            bagua.reduce_scatter(parts[me], block, op)
            expect(block, wanted[me], f"reduce_scatter {what}")
            found = parts[me].clone()
            bagua.reduce_scatter_inplace(found, op)
            expect(found[me], wanted[me], f"reduce_scatter_inplace {what}")


def rank_memory() -> None:
    """Tensors of all kinds of memory: of the daemon, with gaps, large, empty, leaves of autograd."""
    bagua.init_process_group()
    me = bagua.get_rank()
    wanted = sum(part.double() for part in all_data((64, 50), "float32")).float()
    mine = data(me, (64, 50), "float32")

    shared = bagua.empty(64, 50)
    assert shared.dtype is torch.float32 and shared.shape == (64, 50) and not shared.any()
    shared.copy_(mine)
    result = bagua.empty((64, 50))
    bagua.allreduce(shared, result)
    expect(result, wanted, "memory of the daemon")
    bagua.allreduce(shared, mine_too := torch.zeros(64, 50))
    expect(mine_too, wanted, "from memory of the daemon to another")
    bagua.allreduce_inplace(shared[16:32])
    expect(shared[16:32], wanted[16:32], "part of memory of the daemon")

    for gaps in (
        mine.t().contiguous().t(),
        torch.stack([mine, mine], 2)[:, :, 0].clone().unsqueeze(2).expand(64, 50, 2)[:, :, 0],
    ):
        assert torch.equal(gaps, mine)
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
    wide = torch.full((5_000_004,), float(me))
    bagua.reduce_scatter(wide, block := torch.zeros(1_250_001))
    assert torch.equal(block, torch.full_like(block, 6.0))

    nothing = torch.zeros(0)
    bagua.allreduce_inplace(nothing)
    bagua.broadcast(nothing, 1)
    scalar = torch.tensor(float(me))
    bagua.allreduce_inplace(scalar, bagua.ReduceOp.MAX)
    assert scalar.item() == 3
    leaf = torch.nn.Parameter(torch.full((3,), float(me)))
    bagua.broadcast(leaf, 2)
    assert leaf.requires_grad and leaf.is_leaf and leaf.tolist() == [2, 2, 2]


def mistake(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def rank_mistakes() -> list[str]:
    bagua.init_process_group()
    a, b = torch.zeros(2, 3), torch.zeros(7)
    found = [
        mistake(bagua.allreduce, a, b),
        mistake(bagua.allgather, a, b),
        mistake(bagua.allreduce, a, a.double()),
        mistake(bagua.alltoall, b, b),
        mistake(bagua.reduce_scatter_inplace, b),
        mistake(bagua.gather_inplace, a, 5, 0),
        mistake(bagua.scatter_inplace, a, 1.5, 0),
        mistake(bagua.empty, 2, -1),
        mistake(bagua.broadcast, a, 4),
        mistake(bagua.send, a, bagua.get_rank()),
        mistake(bagua.allreduce_inplace, a.to(torch.complex64)),
        mistake(bagua.allreduce_inplace, a.to_sparse()),
        mistake(bagua.allreduce_inplace, [1.0]),
        mistake(bagua.allreduce_inplace, a, bagua.ReduceOp.BOR),
        mistake(bagua.allreduce_inplace, a, 5),
        mistake(bagua.allreduce_inplace, a.bool()),
        mistake(bagua.allreduce_inplace, a.to("meta")),
        mistake(bagua.allreduce_inplace, a, bagua.ReduceOp.SUM, "world"),
    ]
    bagua.barrier()  # nothing was sent: the ranks are still in step
    return found


MISTAKES = [
    "ValueError: send_tensor has 6 elements [2, 3] and recv_tensor 7 [7]: they must have equal sizes.",
    "ValueError: send_tensor has 6 elements [2, 3] and recv_tensor 7 [7]: they must be as 1 to 4.",
    "TypeError: send_tensor is torch.float32 and recv_tensor is torch.float64: they must agree.",
    "ValueError: send_tensor has 7 elements [7], which 4 ranks can't share equally.",
    "ValueError: tensor has 7 elements [7], which 4 ranks can't share equally.",
    "ValueError: tensor has 6 elements [2, 3]; with count=5 this rank must pass ",
    "ValueError: count is 1.5: it must be a whole number of elements, at least 0.",
    "ValueError: size is [2, -1]: no dimension can be negative.",
    "ValueError: src is 4: it must be a rank from 0 to 3.",
    "ValueError: dst is ",
    "TypeError: tensor has dtype torch.complex64: pass torch.view_as_real(tensor).",
    "TypeError: tensor is sparse (torch.sparse_coo): pass tensor.to_dense().",
    "TypeError: tensor is a list: pass a torch.Tensor.",
    "TypeError: torch.float32 tensors can't be reduced with BOR: it needs integers.",
    "ValueError: 5 is not a reduction. Known: SUM (0), ",
    "TypeError: bool tensors can't be reduced with SUM: use MAX (or)",
    "TypeError: tensor is on device meta: pass a tensor on the CPU or a CUDA device.",
    "TypeError: comm is a str: pass a communicator, or None for all ranks.",
]


def test_moves(ranks: Any) -> None:
    ranks.run(rank_moves, N)


def test_reductions(ranks: Any) -> None:
    ranks.run(rank_reductions, N)


@pytest.mark.parametrize("hosts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]]], ids=["one host", "two hosts"])
def test_memory(ranks: Any, hosts: list[list[int]]) -> None:
    ranks.run(rank_memory, hosts=hosts)


def test_between_hosts(ranks: Any) -> None:
    ranks.run(rank_moves, hosts=[[0], [1, 2, 3]])


def test_mistakes_are_told_before_anything_is_sent(ranks: Any) -> None:
    for found in ranks.run(rank_mistakes, N):
        for text, start in zip(found, MISTAKES, strict=True):
            assert text.startswith(start)
