"""torch.distributed.checkpoint, and collectives of objects."""

import torch
from rig.torch_parts import Shard, distribute_tensor
from torch import distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh


def state():
    """One tensor in shards, one that is whole, and numbers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(2)
    whole = torch.randn(7, 5, dtype=torch.float64, generator=generator)
    return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "whole": whole + 1, "step": 3}


def empty(like):
    return {name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for name, one in like.items()}


def gathered(held):
    return {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in held.items()}


def saved(folder):
    held = state()
    checkpoint.save(held, checkpoint_id=str(folder / "sync"))
    back = empty(held)
    checkpoint.load(back, checkpoint_id=str(folder / "sync"))
    return gathered(back)


def saved_in_the_background(folder):
    """While it is written, ranks go on with collectives of their own: its ones are on a thread, so it has a group."""
    held = state()
    group = dist.new_group()
    future = checkpoint.async_save(held, checkpoint_id=str(folder / "async"), process_group=group)
    total = torch.ones(3, dtype=torch.float64)
    for _ in range(20):
        dist.all_reduce(total)
        total /= dist.get_world_size()
    future.result()
    back = empty(held)
    checkpoint.load(back, checkpoint_id=str(folder / "async"))
    return {**gathered(back), "total": total}


def objects(_):
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "é" * rank}
    everyone = [None] * size
    dist.all_gather_object(everyone, mine)
    told = [mine if rank == 0 else None]
    dist.broadcast_object_list(told, 0)
    scattered = [None]
    dist.scatter_object_list(scattered, [f"for {one}" for one in range(size)] if rank == 0 else None, 0)
    at_root = [None] * size if rank == 1 else None
    dist.gather_object(mine, at_root, 1)
    return {"everyone": everyone, "told": told, "scattered": scattered, "at root": at_root}


PROGRAMS = {
    "torch.distributed.checkpoint": saved,
    "torch.distributed.checkpoint, async_save": saved_in_the_background,
    "collectives of objects": objects,
}
