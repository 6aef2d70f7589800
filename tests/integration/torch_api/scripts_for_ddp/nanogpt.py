"""As nanoGPT's train.py: names imported from torch, accumulation by ``require_backward_grad_sync``, AdamW, autocast."""
import os, math
import torch, torch.nn as nn, torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed import init_process_group, destroy_process_group

gradient_accumulation_steps = 4; backend = 'gloo'  # 'nccl', 'gloo', etc.
ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank = int(os.environ['RANK']); ddp_world_size = int(os.environ['WORLD_SIZE'])
    gradient_accumulation_steps //= ddp_world_size
torch.manual_seed(1337 + ddp_rank)
model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 11))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
if ddp: model = DDP(model)
raw_model = model.module if ddp else model
for it in range(3):
    for micro in range(gradient_accumulation_steps):
        if ddp: model.require_backward_grad_sync = (micro == gradient_accumulation_steps - 1)
        X = torch.randint(11, (4, 6)); Y = torch.randint(11, (4, 6))
        with torch.amp.autocast(device_type='cpu', dtype=torch.bfloat16):
            logits = model(X); loss = F.cross_entropy(logits.view(-1, 11), Y.view(-1)) / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad(set_to_none=True)
weights = torch.cat([one.detach().flatten() for one in raw_model.parameters()])
if ddp: destroy_process_group()
