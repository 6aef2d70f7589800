"""DistributedDataParallel, its options, hooks and join, and ZeroRedundancyOptimizer."""

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from .support import batch, mean_square, network, parameters, train

MIB_OF_SMALL_BUCKETS = 0.002


def wrapped(model=None, **options):
    """In several buckets."""
    return DistributedDataParallel(model or network(), bucket_cap_mb=MIB_OF_SMALL_BUCKETS, **options)


def trained(model, **options):
    return {"losses": train(model, **options), "parameters": parameters(model)}


class Branches(nn.Module):
    """Uses one branch in even steps, and the other one in odd steps of rank 1."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([network(), network()])

    def forward(self, inputs, branch):
        return self.branches[branch](inputs)


def find_unused_parameters(_):
    model = wrapped(Branches(), find_unused_parameters=True)

    def forward(module, step):
        inputs, targets = batch(step)
        return nn.functional.mse_loss(module(inputs, step * dist.get_rank() % 2), targets)

    return trained(model, forward=forward)


def buffers(_):
    """BatchNorm: buffers become rank 0's before each forward pass."""
    model = wrapped(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).double())
    return {**trained(model), "buffers": list(model.buffers())}


def standard_hooks(_):
    """In float32 two ranks add in one order: the same bits."""
    found = {}

    def forward(module, step):
        inputs, targets = batch(step, dtype=torch.float32)
        return nn.functional.mse_loss(module(inputs), targets)

    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        torch.manual_seed(5)
        model = wrapped(network(dtype=torch.float32))
        model.register_comm_hook(None, hook)
        found[hook.__name__] = trained(model, forward=forward)
    return found


def power_sgd_hook(_):
    """Its callbacks wait for other operations. In one bucket: with several, ranks of Gloo send in different orders."""
    model = DistributedDataParallel(network(width=48))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return trained(model, steps=6)


def post_local_sgd_hook(_):
    """Gradients go over a group of this rank alone after the second step."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    model = wrapped()
    state = post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return trained(model)


def zero_redundancy_optimizer(_):
    model = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    found = trained(model, optimizer=optimizer)
    optimizer.consolidate_state_dict(0)
    return {**found, "state": optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}}


def zero_redundancy_join(_):
    """Rank r has 2 + r batches."""
    model = wrapped()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    losses = []
    with Join([model, optimizer]):
        for step in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            loss = mean_square(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "parameters": parameters(model)}


def differentiable(_):
    """torch.distributed.nn.functional."""
    from torch.distributed.nn import functional

    mine = torch.arange(4, dtype=torch.float64).add(dist.get_rank()).requires_grad_()
    parts = functional.all_gather(mine)
    total = functional.all_reduce(mine * 2)
    ((parts[0] * parts[-1]).sum() + (total * mine).sum()).backward()
    return {"gradient": mine.grad, "total": total.detach()}


PROGRAMS = {
    "DDP with unused parameters": find_unused_parameters,
    "DDP with buffers": buffers,
    "DDP with standard hooks": standard_hooks,
    "DDP with PowerSGD's hook": power_sgd_hook,
    "DDP with post-local SGD's hook": post_local_sgd_hook,
    "ZeroRedundancyOptimizer": zero_redundancy_optimizer,
    "ZeroRedundancyOptimizer with join": zero_redundancy_join,
    "collectives with gradients": differentiable,
}
