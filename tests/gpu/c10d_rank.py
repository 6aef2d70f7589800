"""A rank of the section ``c10d``: torch.distributed's backend "bagua" on CUDA tensors."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpu.common import device_of
from gpu.training_rank import model_of, quiet

COUNT = 1001
WIDTH, LAYERS, BATCH, STEPS = 64, 4, 16, 4


def join(backend, store):
    """(rank, ranks), once all are there."""
    import bagua.c10d  # noqa: F401 - before torch 2.5 nothing else would register it

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    return rank, ranks


def of(rank, device, count=COUNT):
    """A rank's numbers, small integers: sums are exact."""
    return torch.arange(count, dtype=torch.float32, device=device) % 97 + rank


def operations(rank, ranks, device):
    """By name: calls the operation, and says whether the result is right."""
    mine, everyone = (lambda: of(rank, device)), [of(one, device) for one in range(ranks)]
    total = torch.stack(everyone).sum(0)
    left, right = (rank - 1) % ranks, (rank + 1) % ranks

    def into(size, wanted, call):
        """``call(out)`` fills a tensor of ``size``."""
        out = torch.empty(size, device=device)
        call(out)
        return torch.equal(out, wanted)

    def in_place(data, wanted, call, *more):
        call(data, *more)
        return torch.equal(data, wanted)

    def later():
        data = mine()
        dist.all_reduce(data, async_op=True).wait()
        return torch.equal(data * 2, total * 2)  # on the caller's stream, with no other wait

    def send_and_receive(found):
        calls = [dist.P2POp(dist.isend, mine(), right), dist.P2POp(dist.irecv, found, left)]
        for work in dist.batch_isend_irecv(calls):
            work.wait()

    def objects():
        found = [None] * ranks
        dist.all_gather_object(found, {"rank": rank})
        return found == [{"rank": one} for one in range(ranks)]

    def reduced(data, wanted, *op):
        return lambda: in_place(data, wanted, dist.all_reduce, *op)

    large = 1 << 24
    rows = torch.cat([of(rank + 10 * to, device) for to in range(ranks)])
    return {
        "all_reduce": reduced(mine(), total),
        "all_reduce AVG": reduced(mine(), total / ranks, dist.ReduceOp.AVG),
        "all_reduce MAX": reduced(mine(), everyone[-1], dist.ReduceOp.MAX),
        "all_reduce bfloat16": reduced(
            torch.ones(7, device=device).bfloat16(), torch.full((7,), ranks, device=device).bfloat16()
        ),
        "all_reduce int64": reduced(mine().long(), total.long()),
        "all_reduce 64 MiB": reduced(of(rank, device, large), sum(of(one, device, large) for one in range(ranks))),
        "all_reduce, async": later,
        "all_reduce, strided": reduced(torch.stack([mine(), mine() + 1], 1)[:, 0], total),
        "broadcast": lambda: in_place(mine(), everyone[1], dist.broadcast, 1),
        "all_gather": lambda: into(
            ranks * COUNT, torch.cat(everyone), lambda out: dist.all_gather_into_tensor(out, mine())
        ),
        "reduce_scatter": lambda: into(
            COUNT, total, lambda out: dist.reduce_scatter_tensor(out, torch.cat([mine()] * ranks))
        ),
        "all_to_all": lambda: into(
            ranks * COUNT,
            torch.cat([of(one + 10 * rank, device) for one in range(ranks)]),
            lambda out: dist.all_to_all_single(out, rows),
        ),
        "send and receive": lambda: into(COUNT, everyone[left], send_and_receive),
        "objects": objects,
    }


def gradients(model, wrapped, rank, device):
    """How far the parameters of ``wrapped`` are, after some steps, from those of ``model``, which sees all batches."""
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, wrapped)]
    ranks = dist.get_world_size()
    for step in range(STEPS):
        batches = []
        for one in range(ranks):
            generator = torch.Generator().manual_seed(step * ranks + one)
            batches.append(torch.randn(BATCH, WIDTH, generator=generator).to(device))
        model(torch.cat(batches)).square().mean().backward()
        wrapped(batches[rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    off = [
        (full(mine) - full(its)).norm() / full(its).norm()
        for its, mine in zip(model.parameters(), wrapped.parameters(), strict=True)
    ]
    return float(max(off))


def full(parameter):
    """Also of a sharded one."""
    found = parameter.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def check(port, kind, limit_s, backend, store):
    """``wrong``: words on operations that went wrong; ``apart``: of DDP's and FSDP2's parameters, or the error."""
    quiet()
    device = device_of(kind)
    rank, ranks = join(backend, store)
    wrong, apart = {}, {}
    for name, call in operations(rank, ranks, device).items():
        if "nccl" in backend and "strided" in name:
            continue  # NCCL takes contiguous tensors alone
        try:
            if not call():
                wrong[name] = "another result"
        except Exception as error:
            wrong[name] = f"{type(error).__name__}: {error}"
    places = [device] if device.type == "cuda" else None
    for name, wrap in {
        "DDP": lambda model: DistributedDataParallel(model, device_ids=places),
        "FSDP2": sharded,
    }.items():
        model, copy = model_of(WIDTH, LAYERS, device), model_of(WIDTH, LAYERS, device)
        try:
            apart[name] = gradients(model, wrap(copy), rank, device)
        except Exception as error:
            apart[name] = f"{type(error).__name__}: {error}"
    dist.barrier()
    dist.destroy_process_group()
    return {"wrong": wrong, "apart": apart}


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return model
