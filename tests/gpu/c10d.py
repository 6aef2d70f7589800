"""Section: torch.distributed's backend "bagua" on CUDA tensors: operations, DDP and FSDP2 against one process."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpu.common import device_of
from gpu.engine_run import run_ranks
from gpu.findings import section
from gpu.training_rank import model_of, quiet

APART = 1e-5
BACKENDS = ("bagua", "cpu:bagua,cuda:nccl")


def work(findings, given):
    for backend in BACKENDS:
        if given.device != "cuda" and "nccl" in backend:
            findings.note(f"{backend}: a rehearsal has no NCCL.")
            continue
        with findings.guarded(backend), tempfile.TemporaryDirectory() as folder:
            also = {"NCCL_SOCKET_IFNAME": "lo"} if "nccl" in backend else {}  # the ranks share a card
            found = run_ranks(
                check,
                ((0, 1),),
                given.device,
                "staged",
                given.seconds / len(BACKENDS),
                also=also,
                backend=backend,
                store=os.path.join(folder, "store"),
            )
            for rank, one in enumerate(found):
                findings.check(f"{backend}, rank {rank}: operations", not one["wrong"], str(one["wrong"]))
                for model, apart in one["apart"].items():
                    good = isinstance(apart, float) and apart <= APART
                    findings.check(f"{backend}, rank {rank}: {model} as one process", good, str(apart))


# In a rank


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


def operations(rank, ranks, device, strided):
    """(name, result, the right one) of each operation."""
    mine, everyone = (lambda: of(rank, device)), [of(one, device) for one in range(ranks)]
    total = torch.stack(everyone).sum(0)
    left, right = (rank - 1) % ranks, (rank + 1) % ranks

    def reduced(data, *op, **more):
        work = dist.all_reduce(data, *op, **more)
        if work is not None:
            work.wait()  # on the caller's stream, with no other wait
        return data

    def filled(call, count=1):
        out = torch.empty(count * COUNT, device=device)
        call(out)
        return out

    yield "all_reduce", reduced(mine()), total
    yield "all_reduce AVG", reduced(mine(), dist.ReduceOp.AVG), total / ranks
    yield "all_reduce MAX", reduced(mine(), dist.ReduceOp.MAX), everyone[-1]
    ones = torch.ones(7, device=device).bfloat16()
    yield "all_reduce bfloat16", reduced(ones.clone()), ones * ranks
    yield "all_reduce int64", reduced(mine().long()), total.long()
    large = [of(one, device, 1 << 24) for one in range(ranks)]
    yield "all_reduce 64 MiB", reduced(large[rank].clone()), sum(large)
    yield "all_reduce, async", reduced(mine(), async_op=True) * 2, total * 2
    if strided:
        yield "all_reduce, strided", reduced(torch.stack([mine(), mine() + 1], 1)[:, 0]), total
    yield "broadcast", filled(lambda out: dist.broadcast(out.copy_(mine()), 1)), everyone[1]
    whole = torch.cat(everyone)
    yield "all_gather", filled(lambda out: dist.all_gather_into_tensor(out, mine()), ranks), whole
    yield "reduce_scatter", filled(lambda out: dist.reduce_scatter_tensor(out, torch.cat([mine()] * ranks))), total
    rows = [torch.cat([of(one + 10 * to, device) for to in range(ranks)]) for one in range(ranks)]
    wanted = torch.cat([of(one + 10 * rank, device) for one in range(ranks)])
    yield "all_to_all", filled(lambda out: dist.all_to_all_single(out, rows[rank]), ranks), wanted
    found = torch.empty(COUNT, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine(), right), dist.P2POp(dist.irecv, found, left)]):
        work.wait()
    yield "send and receive", found, everyone[left]
    objects = [None] * ranks
    dist.all_gather_object(objects, rank)
    yield "objects", torch.tensor(objects), torch.arange(ranks)


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
    return getattr(parameter.detach(), "full_tensor", parameter.detach)()


def check(port, kind, limit_s, backend, store):
    """``wrong``: words on operations that went wrong; ``apart``: of DDP's and FSDP2's parameters, or the error."""
    quiet()
    device = device_of(kind)
    rank, ranks = join(backend, store)
    wrong, apart = {}, {}
    name = "before the first"
    try:
        for name, found, right in operations(rank, ranks, device, strided="nccl" not in backend):
            if not torch.equal(found, right):
                wrong[name] = "another result"
    except Exception as error:
        wrong[f"after {name}"] = f"{type(error).__name__}: {error}"
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


if __name__ == "__main__":
    sys.exit(section("c10d", work, __doc__))
