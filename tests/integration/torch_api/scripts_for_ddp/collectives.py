"""No DDP: gradients are averaged by collectives."""
import os
import torch
import torch.distributed.distributed_c10d as c10d
import torch.distributed as dist


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()


c10d.init_process_group(init_method="env://", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    average_gradients(model)
    optimizer.step()
weights = torch.cat([one.detach().flatten() for one in model.parameters()])
dist.destroy_process_group()
