"""FSDP1 and FSDP2, DTensor, tensor parallel, and a training loop like torchtitan's."""

import torch
from rig.torch_parts import DTensor, Partial, Replicate, Shard, distribute_tensor, fully_shard
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .support import network, parameters, train


def fsdp2(_):
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, optimizer=optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return {"losses": losses, "parameters": parameters(model), "norm": getattr(norm, "full_tensor", lambda: norm)()}


def fsdp1(_):
    found = {}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        torch.manual_seed(5)
        model = FullyShardedDataParallel(
            network(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
        )
        losses = train(model)
        with FullyShardedDataParallel.summon_full_params(model):
            found[strategy.name] = {"losses": losses, "parameters": parameters(model)}
    return found


def dtensor(_):
    """All ways to lay a tensor out, and from each to each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(6, 10, dtype=torch.float64)
    found = {}
    for begin in (Replicate(), Shard(0), Shard(1)):
        one = distribute_tensor(whole, mesh, [begin])
        for end in (Replicate(), Shard(0), Shard(1)):
            found[f"{begin} {end}"] = one.redistribute(mesh, [end]).to_local().clone()
        found[f"{begin} product"] = (one @ one.t()).full_tensor()
    partial = DTensor.from_local(whole * (1 + dist.get_rank()), mesh, [Partial()])
    found["partial"] = partial.redistribute(mesh, [Replicate()]).to_local()
    found["partial shard"] = partial.redistribute(mesh, [Shard(0)]).to_local()
    return found


def tensor_parallel(_):
    model = network()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(
        model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}
    )
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 8, generator=generator, dtype=torch.float64)  # the same on all ranks

    def forward(module, step):
        return nn.functional.mse_loss(module(inputs), inputs[:, :4].sin())

    return {"losses": train(model, forward=forward), "parameters": parameters(model)}


# As torchtitan does it: tensor parallel inside, sharded outside, clipping, a schedule, checkpoints that it goes on from


def titan_model():
    """The model, its optimizer and schedule, and which share of the data is this rank's."""
    size = dist.get_world_size()
    tensor = 2 if size % 4 == 0 else 1
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = network()
    if tensor > 1:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    return model, optimizer, schedule, mesh["dp"].get_local_rank()


def clip(model, limit):
    """Clips gradients by their norm, which it returns. They may lie on different meshes."""
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    norm = torch.stack([whole(one).square().sum() for one in gradients]).sum().sqrt().item()
    for one in gradients:
        one.mul_(min(1.0, limit / norm))
    return norm


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def titan_steps(model, optimizer, schedule, share, steps):
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + share)
        inputs = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs[:, :4].sin())
        loss.backward()
        norm = clip(model, 0.5)
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.SUM)
        losses += [mean.item(), norm]
    return losses


def titan(folder):
    model, optimizer, schedule, share = titan_model()
    losses = titan_steps(model, optimizer, schedule, share, range(3))
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=str(folder / "state"))
    resumed, optimizer, again, share = titan_model()
    weights, moments = get_state_dict(resumed, optimizer)
    checkpoint.load({"model": weights, "optimizer": moments}, checkpoint_id=str(folder / "state"))
    set_state_dict(resumed, optimizer, model_state_dict=weights, optim_state_dict=moments)
    again.load_state_dict(schedule.state_dict())
    losses += titan_steps(resumed, optimizer, again, share, range(3, 5))
    return {"losses": losses, "parameters": parameters(resumed)}


PROGRAMS = {
    "FSDP2": fsdp2,
    "FSDP1": fsdp1,
    "DTensor": dtensor,
    "tensor parallel": tensor_parallel,
    "like torchtitan": titan,
}
