#!/usr/bin/env python
"""Ways to name the same: modules in variables, imports in functions, imports of all names, a name that is taken."""; import torch
from torch.nn.parallel import *
from torch import distributed as d, nn; δ = torch.distributed  # two bytes each: é, ü
P = nn.parallel
bagua = "a word of this program"


def begin(comm):
    comm.barrier()


def wrap(model):
    from torch.nn.parallel import DistributedDataParallel as Local

    class Mine(Local):
        def forward(self, *inputs):
            return super().forward(*inputs) * 2
    return Mine(model)


if not δ.is_initialized(): é = "ü"; δ.init_process_group(backend=("gloo" if not torch.cuda.is_available() else "nccl")); begin(d)
torch.manual_seed(d.get_rank())
model = wrap(nn.Linear(6, 3)); other = P.DistributedDataParallel(nn.Linear(3, 2), broadcast_buffers=True, bucket_cap_mb=1)
D = torch.nn.parallel.distributed.DistributedDataParallel; third = D(module=nn.Linear(2, 1)); assert D is DistributedDataParallel
optimizer = torch.optim.Adam([*model.parameters(), *other.parameters(), *third.parameters()])
for _ in range(3): optimizer.zero_grad(); third(other(model(torch.randn(4, 6)))).square().sum().backward(); optimizer.step()
weights = torch.cat([one.detach().flatten() for group in optimizer.param_groups for one in group["params"]])
assert bagua.endswith("program"); d.destroy_process_group()
