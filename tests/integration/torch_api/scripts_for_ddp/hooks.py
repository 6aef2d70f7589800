"""DDP with what Bagua's has not: it stays torch's, over backend "bagua"."""
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group()
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(16, 4))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
weights = torch.cat([one.detach().flatten() for one in model.parameters()])
dist.destroy_process_group()
