"""As torchvision's references: a path of four names, several statements in a line, address and rank as arguments."""
import argparse, os
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import TensorDataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
def init_distributed_mode(args):
    args.rank = int(os.environ["RANK"]); args.world_size = int(os.environ['WORLD_SIZE']); args.distributed = True
    dist.init_process_group(backend=args.backend, init_method=args.dist_url, world_size=args.world_size, rank=args.rank); dist.barrier()
def reduce_across_processes(val):
    t = torch.tensor(val, dtype=torch.float64); dist.barrier(); dist.all_reduce(t); return t
def main(args):
    init_distributed_mode(args); torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(10, (40,)))
    sampler = DistributedSampler(data); loader = DataLoader(data, 5, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model_without_ddp = model
    if args.distributed: model = nn.parallel.DistributedDataParallel(model); model_without_ddp = model.module
    for epoch in range(2):
        sampler.set_epoch(epoch); total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y); opt.zero_grad(); loss.backward(); opt.step(); total += loss.item()
        total, n = reduce_across_processes([total, len(loader)]).tolist()
    assert n == 8
    return torch.cat([one.detach().flatten() for one in model_without_ddp.state_dict().values()])
weights = main(argparse.Namespace(backend='gloo', dist_url='env://'))
dist.destroy_process_group()
