"""Parts of torch that moved, or came, after version 2.4, for tests: None where there is none."""

import torch
from torch.distributed import fsdp

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # before torch 2.5, which made it public
    from torch.distributed._tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

# FSDP2, public since torch 2.6, where CPU tensors fail on a class without this method, on any backend.
fully_shard = getattr(fsdp, "fully_shard", None) if hasattr(torch.cpu.Stream, "wait_event") else None

__all__ = ["DTensor", "Partial", "Replicate", "Shard", "distribute_tensor", "fully_shard"]
