"""All operations of the backend, against their definitions: dtypes, shapes, groups, order, futures."""

import contextlib
import functools
import operator
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from rig.ranks.scenarios import check_passed
from torch.distributed import _functional_collectives as functional

MOVED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip
DEADLINE_S = 600.0  # for all of them, on a machine with many other processes
pytestmark = pytest.mark.timeout(700)
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 4), (300, 201)]


def me():
    return dist.get_rank()


def size():
    return dist.get_world_size()


def of_rank(rank, shape=(3, 5), dtype=torch.float64):
    """The tensor that this rank brings: small whole numbers, so that sums are exact in every dtype."""
    count = int(torch.Size(shape).numel())
    found = ((torch.arange(count) + rank) % 5).reshape(shape).to(dtype)
    return found * (1 + 2j) if dtype.is_complex else found


def all_of(shape=(3, 5), dtype=torch.float64):
    return [of_rank(rank, shape, dtype) for rank in range(size())]


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def all_reduce():
    for shape in SHAPES:
        for dtype in MOVED:
            dist.all_reduce(tensor := of_rank(me(), shape, dtype))
            whole = torch.stack(all_of(shape, dtype))
            same(tensor, (whole.any(0) if dtype is torch.bool else whole.sum(0)).to(dtype))
    for op, combine in (("MIN", torch.amin), ("MAX", torch.amax), ("PRODUCT", torch.prod), ("AVG", torch.mean)):
        dist.all_reduce(tensor := of_rank(me()), getattr(dist.ReduceOp, op))
        torch.testing.assert_close(tensor, combine(torch.stack(all_of()), 0))
    for op, combine in (("BAND", operator.and_), ("BOR", operator.or_), ("BXOR", operator.xor)):
        dist.all_reduce(tensor := of_rank(me(), dtype=torch.int32), getattr(dist.ReduceOp, op))
        same(tensor, functools.reduce(combine, all_of(dtype=torch.int32)))


def outputs_that_are_not_contiguous():
    """Each operation writes through the strides of its outputs, and between their elements nothing."""

    def output():
        return torch.zeros(6, 4).t()[::2]

    def given(number):
        return (torch.arange(12.0).reshape(6, 2) + number).t()

    gathered = [output() for _ in range(size())]
    dist.all_gather(gathered, given(me()))
    exchanged = [output() for _ in range(size())]
    dist.all_to_all(exchanged, [given(me()) for _ in range(size())])
    at_last = [output() for _ in range(size())] if me() == size() - 1 else None
    dist.gather(given(me()), at_last, size() - 1)
    for found in (gathered, exchanged, at_last or gathered):
        for rank, one in enumerate(found):
            same(one, given(rank))
    dist.scatter(taken := output(), [given(rank) for rank in range(size())] if me() == 0 else None, 0)
    same(taken, given(me()))
    dist.reduce_scatter(taken := output(), [given(rank) for rank in range(size())])
    same(taken, size() * given(me()))
    whole = torch.zeros(size() * 2, 6).t().contiguous().t()
    dist.all_gather_into_tensor(whole, given(me()))
    same(whole, torch.cat([given(rank) for rank in range(size())]))
    dist.reduce_scatter_tensor(taken := output(), whole)
    same(taken, size() * given(me()))
    dist.all_to_all_single(single := torch.zeros(6, size()).t(), torch.full((6, size()), 1.0 * me()).t())
    same(single, torch.arange(1.0 * size()).unsqueeze(1).expand(size(), 6))
    dist.reduce(taken, 0)
    if me() == 0:
        same(taken, size() * sum(given(rank) for rank in range(size())))
    assert all(not one.is_contiguous() for one in (taken, whole, single, *gathered))


def movements():
    for dtype in MOVED:
        for shape in SHAPES:
            for root in range(size()):
                dist.broadcast(tensor := of_rank(me(), shape, dtype), root)
                same(tensor, of_rank(root, shape, dtype))
            outputs = [torch.empty(shape, dtype=dtype) for _ in range(size())]
            dist.all_gather(outputs, of_rank(me(), shape, dtype))
            for rank, output in enumerate(outputs):
                same(output, of_rank(rank, shape, dtype))
    for root in range(size()):
        outputs = [torch.empty(3, 5, dtype=torch.float64) for _ in range(size())] if me() == root else None
        dist.gather(of_rank(me()), outputs, root)
        for rank, output in enumerate(outputs or ()):
            same(output, of_rank(rank))
        given = [of_rank(10 * root + rank) for rank in range(size())] if me() == root else None
        dist.scatter(taken := torch.empty(3, 5, dtype=torch.float64), given, root)
        same(taken, of_rank(10 * root + me()))
        dist.reduce(tensor := of_rank(me()), root)
        if me() == root:
            same(tensor, torch.stack(all_of()).sum(0))
    for count in (1, 700_001):
        dist.all_gather_into_tensor(whole := torch.empty(size() * count), of_rank(me(), (count,), torch.float32))
        same(whole, torch.cat(all_of((count,), torch.float32)))
        dist.reduce_scatter_tensor(part := torch.empty(count), whole)
        same(part, size() * of_rank(me(), (count,), torch.float32))


def coalesced():
    tensors = [of_rank(me(), (n,)) for n in (1, 1000, 0, 200_000)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        same(tensor, torch.stack(all_of(tuple(tensor.shape))).sum(0))
    outputs = [torch.empty(size() * n, dtype=torch.float64) for n in (1, 70_000)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for output in outputs:
            dist.all_gather_into_tensor(output, of_rank(me(), (output.numel() // size(),)))
    manager.wait()
    for output in outputs:
        same(output, torch.cat(all_of((output.numel() // size(),))))


def a_block_that_an_exception_ends():
    """Operations that were called in it take place. The next block has its own operations alone."""
    device, world = torch.device("cpu"), dist.group.WORLD
    first, second = of_rank(me()), of_rank(me())
    with contextlib.suppress(KeyError), dist.distributed_c10d._coalescing_manager(device=device):
        assert world is not None
        world.allreduce([first], dist.AllreduceOptions())
        raise KeyError
    with dist.distributed_c10d._coalescing_manager(device=device, async_ops=True) as manager:
        dist.all_reduce(second)
    manager.wait()
    dist.barrier()
    for tensor in (first, second):
        same(tensor, torch.stack(all_of()).sum(0))


def all_to_all():
    gives = [of_rank(10 * me() + peer, (me() + 2 * peer, 3)) for peer in range(size())]
    takes = [torch.empty(peer + 2 * me(), 3, dtype=torch.float64) for peer in range(size())]
    dist.all_to_all(takes, gives)
    for peer, found in enumerate(takes):
        same(found, of_rank(10 * peer + me(), (peer + 2 * me(), 3)))
    whole = torch.empty(sum(len(one) for one in takes), 3, dtype=torch.float64)
    dist.all_to_all_single(whole, torch.cat(gives), [len(one) for one in takes], [len(one) for one in gives])
    same(whole, torch.cat(takes))
    even = torch.empty(size() * 4)
    dist.all_to_all_single(even, torch.arange(size() * 4) + 100.0 * me())
    same(even, torch.cat([torch.arange(4) + 4.0 * me() + 100.0 * peer for peer in range(size())]))


def dtypes_that_we_have_no_name_for():
    """They travel as bytes, several for an element."""
    for dtype, like in ((torch.uint16, torch.int16), (torch.uint32, torch.int32), (torch.float8_e5m2, torch.uint8)):

        def given(number, rows, dtype=dtype, like=like):
            return of_rank(number, (rows, 3), like).view(dtype)

        def same_bits(found, expected, like=like):
            same(found.contiguous().view(like), expected.contiguous().view(like))

        gives = [given(10 * me() + peer, me() + 2 * peer) for peer in range(size())]
        takes = [given(0, peer + 2 * me()) for peer in range(size())]
        dist.all_to_all(takes, gives)
        for peer, found in enumerate(takes):
            same_bits(found, given(10 * peer + me(), peer + 2 * me()))
        sizes = [2 * me() + peer for peer in range(size())], [me() + 2 * peer for peer in range(size())]
        whole, parts = given(0, sum(sizes[0])), [given(10 * me() + peer, rows) for peer, rows in enumerate(sizes[1])]
        dist.all_to_all_single(whole, torch.cat([part.view(like) for part in parts]).view(dtype), *sizes)
        same_bits(whole, torch.cat([one.view(like) for one in takes]).view(dtype))
        sent = dist.isend(given(me(), 2).t(), (me() + 1) % size())
        dist.recv(found := given(0, 2).t(), (me() - 1) % size())
        same_bits(found, given((me() - 1) % size(), 2).t())
        assert sent is not None
        sent.wait()


def functional_collectives_of_complex_numbers():
    """Those of ``dist`` pass them on as pairs; these as they are."""
    rows = torch.arange(1.0 * size()).repeat_interleave(2) + 1j * me()
    found = functional.wait_tensor(functional.all_to_all_single(rows, None, None, dist.group.WORLD))
    same(found, (me() + 1j * torch.arange(size())).repeat_interleave(2))
    found = functional.wait_tensor(functional.all_gather_tensor(rows.conj(), 0, dist.group.WORLD))
    same(found, torch.cat([torch.arange(1.0 * size()).repeat_interleave(2) - 1j * rank for rank in range(size())]))


def tags():
    """Messages of different tags overtake each other, those of one tag do not."""
    right, left = (me() + 1) % size(), (me() - 1) % size()
    works = [dist.isend(torch.tensor([10.0 * tag + i]), right, tag=tag) for tag in (1, 2) for i in range(3)]
    found = []
    for tag in (2, 1):
        for _ in range(3):
            tensor = torch.empty(1)
            assert dist.recv(tensor, left, tag=tag) == left
            found.append(tensor.item())
    assert found == [20, 21, 22, 10, 11, 12]
    for work in works:
        assert work is not None
        work.wait()


def any_source_beside_named_ones():
    """Receives wait before anything is sent. Each rank's messages come in their order, whatever names their source."""
    count, named = 5, 2
    if me() == 0:
        last = size() - 1
        tensors = [torch.empty(300_000) for _ in range(count * last)]
        works = [dist.irecv(tensor, last if i < named else None, tag=3) for i, tensor in enumerate(tensors)]
        dist.barrier()
        found = {}
        for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            assert work is not None
            work.wait()
            source = last if i < named else work._source_rank()
            assert tensor.unique().numel() == 1
            found.setdefault(source, []).append(int(tensor[0]))
        assert found == {rank: [10 * rank + i for i in range(count)] for rank in range(1, size())}
    else:
        dist.barrier()
        for i in range(count):
            dist.send(torch.full((300_000,), 10.0 * me() + i), 0, tag=3)


def tensors_with_gradients():
    """Operations record nothing for autograd: neither what reads such a tensor, nor what writes one that is a leaf."""
    n, last = size(), size() - 1
    seen = []

    def made(*shape, number=0.0, plain=True):
        whole = torch.full(shape, number) if plain else torch.full(shape[::-1], number).t()
        seen.append(whole.requires_grad_())
        return whole

    def several(plain, number=0.0):
        return [made(2, 3, number=number + rank, plain=plain) for rank in range(n)]

    for plain in (True, False):
        own = 1.0 + me()
        total = n * (n + 1) / 2
        dist.all_reduce(tensor := made(2, 3, number=own, plain=plain))
        assert tensor.unique().tolist() == [total]
        dist.broadcast(tensor := made(2, 3, number=own, plain=plain), last)
        assert tensor.unique().tolist() == [n]
        dist.reduce(tensor := made(2, 3, number=own, plain=plain), 0)
        assert me() or tensor.unique().tolist() == [total]
        dist.all_gather(found := several(plain), made(2, 3, number=own, plain=plain))
        assert [one.unique().tolist() for one in found] == [[1.0 + rank] for rank in range(n)]
        dist.all_gather_into_tensor(whole := made(2 * n, 3, plain=plain), made(2, 3, number=own, plain=plain))
        assert whole[:, 0].tolist() == [1.0 + rank // 2 for rank in range(2 * n)]
        dist.gather(made(2, 3, number=own, plain=plain), several(plain) if me() == 0 else None, 0)
        dist.scatter(tensor := made(2, 3, plain=plain), several(plain) if me() == 0 else None, 0)
        assert tensor.unique().tolist() == [me()]
        dist.reduce_scatter(tensor := made(2, 3, plain=plain), several(plain))
        assert tensor.unique().tolist() == [n * me()]
        dist.reduce_scatter_tensor(tensor := made(2, 3, plain=plain), made(2 * n, 3, number=own, plain=plain))
        assert tensor.unique().tolist() == [total]
        dist.all_to_all(found := several(plain), several(plain, own))
        assert [one.unique().tolist() for one in found] == [[1.0 + rank + me()] for rank in range(n)]
        dist.all_to_all_single(whole := made(n, 3, plain=plain), made(n, 3, number=own, plain=plain))
        assert whole[:, 0].tolist() == [1.0 + rank for rank in range(n)]
        dist.all_to_all_single(whole := torch.zeros(n, 3), made(n, 3, number=own, plain=plain), [1] * n, [1] * n)
        assert whole.grad_fn is None and not whole.requires_grad
        sent = dist.isend(made(2, 3, number=own, plain=plain), (me() + 1) % n)
        dist.recv(tensor := made(2, 3, plain=plain), (me() - 1) % n)
        assert tensor.unique().tolist() == [1.0 + (me() - 1) % n]
        assert sent is not None
        sent.wait()
        dist.barrier()
        if me():
            dist.send(made(2, 3, number=own, plain=plain), 0)
        else:
            for _ in range(last):
                source = dist.recv(tensor := made(2, 3, plain=plain))
                assert tensor.unique().tolist() == [1.0 + source]
        with dist.distributed_c10d._coalescing_manager():
            parts = several(plain, 1.0)
            for one in parts:
                dist.all_reduce(one)
        assert [one.unique().tolist() for one in parts] == [[n * (1.0 + rank)] for rank in range(n)]
    dist.all_reduce(sparse := torch.eye(3).to_sparse(1).requires_grad_())
    assert sparse.to_dense().tolist() == (n * torch.eye(3)).tolist()
    for one in [*seen, sparse]:
        assert one.is_leaf and one.requires_grad and one.grad_fn is None


def tensors_of_inference_mode():
    """They may be written in that mode alone, and threads of ours that finish an operation are not in it."""
    n = size()
    with torch.inference_mode():
        whole, own, parts = torch.zeros(3, 2).t(), torch.full((2,), 1.0 * me()), [torch.zeros(2) for _ in range(n)]
        exchanged = [torch.zeros(3, 1).t() for _ in range(n)]
        for work in (dist.all_reduce(whole.add_(1), async_op=True), dist.all_gather(parts, own, async_op=True)):
            work.get_future().wait()
    assert whole.unique().tolist() == [n] and [part.unique().item() for part in parts] == list(range(n))
    dist.all_reduce(whole)
    assert whole.is_inference() and whole.unique().tolist() == [n * n]
    dist.all_to_all(exchanged, [torch.full((1, 3), 1.0 * peer) for peer in range(n)])
    assert {one.unique().item() for one in exchanged} == {me()}


def works_and_futures():
    tensors = [torch.full((200_000,), float(i + me())) for i in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait() and work.is_completed() and work.is_success()
    for i, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        assert tensor.unique().item() == sum(i + rank for rank in range(size()))
        same(work.result()[0], tensor)
        same(work.get_future().wait()[0], tensor)
    work = dist.all_reduce(tensor := torch.ones(3), async_op=True)
    while not work.is_completed():
        pass
    assert tensor.tolist() == [size()] * 3


def a_callback_that_communicates():
    """PowerSGD's hook does so: it must not wait for the thread on which it runs."""

    def again(future):
        dist.all_reduce(tensor := future.value()[0])
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(torch.ones(100), async_op=True).get_future().then(again)
    assert future.wait().unique().item() == size() ** 3


def threads():
    """Groups of their own for threads."""

    def work(group):
        for _ in range(20):
            dist.all_reduce(tensor := torch.ones(5000), group=group)
            assert tensor[0] == size()

    made = [dist.new_group() for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, made))


def many_at_once():
    """More than the channel has slots."""
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(1500)]
    for work in works:
        work.wait()
    works = [dist.isend(torch.ones(1), (me() + 1) % size()) for _ in range(600)]
    works += [dist.irecv(torch.ones(1), (me() - 1) % size()) for _ in range(600)]
    for work in works:
        work.wait()


def twice_in_one_store(folder):
    """As under torchrun. A message that was received is forgotten there."""
    rank, world = me(), size()
    store = dist.FileStore(f"{folder}/one for all", world)
    for last in (1, world - 1):
        dist.destroy_process_group()
        dist.init_process_group("bagua", store=store, rank=rank, world_size=world)
        if me() == 0:
            dist.recv(found := torch.zeros(1))
            assert found.item() == last
        elif me() == last:
            dist.send(torch.tensor([1.0 * last]), 0)


FUNCTIONS = [
    all_reduce, outputs_that_are_not_contiguous, movements, coalesced, a_block_that_an_exception_ends, all_to_all,
    dtypes_that_we_have_no_name_for, functional_collectives_of_complex_numbers, tags, any_source_beside_named_ones,
    tensors_with_gradients, tensors_of_inference_mode, works_and_futures, a_callback_that_communicates, threads,
    many_at_once,
]  # fmt: skip
NAMES = [one.__name__ for one in (*FUNCTIONS, twice_in_one_store)]


def run_all(folder):
    import bagua.c10d  # noqa: F401

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("bagua", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for function in FUNCTIONS:
        function()
        dist.barrier()
        print(f"passed {function.__name__}", flush=True)
    twice_in_one_store(folder)  # ends the default group
    print(f"passed {twice_in_one_store.__name__}", flush=True)


@pytest.fixture(scope="module", params=[[[0, 1, 2]], [[0, 1], [2]]], ids=["one host", "two hosts"])
def outputs(request, make_ranks, tmp_path_factory):
    """Output of the ranks of a layout."""
    folder = tmp_path_factory.mktemp("c")
    with make_ranks(folder) as ranks:
        started = ranks.start(run_all, hosts=request.param, folder=str(folder))
        ranks.wait(DEADLINE_S)
        return [rank.output for rank in started]


@pytest.mark.parametrize("name", NAMES)
def test_operations(outputs, name):
    check_passed(outputs, name)
