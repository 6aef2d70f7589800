"""FSDP1 and FSDP2, DTensor, tensor parallel, and a training loop like torchtitan's."""

import torch
from rig.torch_parts import DTensor, Partial, Replicate, Shard, distribute_tensor, fully_shard
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .support import batch, network, parameters, train


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


def fsdp1_mixed(_):
    """Parameters travel in bfloat16, gradients in float32. Two ranks add in one order: the same bits."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(
        network(dtype=torch.float32),
        device_id=torch.device("cpu"),
        mixed_precision=precision,
        cpu_offload=CPUOffload(False),
        use_orig_params=True,
    )

    def forward(module, step):
        inputs, targets = batch(step, dtype=torch.float32)
        return nn.functional.mse_loss(module(inputs).float(), targets)

    return {"losses": train(model, forward=forward)}


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


# As torchtitan does it: a transformer, tensor and sequence parallel inside, sharded outside, clipping, a schedule, and
# checkpoints from which it goes on


class Block(nn.Module):
    """Attention and a feed-forward network, [batch, time, width] -> the same."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        normal = self.attention_norm(x)
        size = normal.shape[0], normal.shape[1], -1, x.shape[-1] // self.heads
        q, k, v = (one(normal).view(size).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Transformer(nn.Module):
    def __init__(self, words=32, width=16, layers=2, heads=4):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return logits


def titan_model():
    """The model, its optimizer and schedule, and which share of the data is this rank's."""
    size = dist.get_world_size()
    tensor = 2 if size % 4 == 0 else 1
    mesh = init_device_mesh("cpu", (size // tensor, tensor), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    model = Transformer().double()
    if tensor > 1:
        for layer in model.layers:
            parallelize_module(
                layer,
                mesh["tp"],
                {
                    **{name: ColwiseParallel() for name in ("q", "k", "v", "up")},
                    **{name: RowwiseParallel() for name in ("out", "down")},
                },
            )
    for layer in model.layers:
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
        tokens = torch.randint(0, 32, (4, 9), generator=generator)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
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
    "FSDP1 in mixed precision": fsdp1_mixed,
    "DTensor": dtensor,
    "tensor parallel": tensor_parallel,
    "like torchtitan": titan,
}
