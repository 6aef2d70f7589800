"""Programs for torch.distributed that know nothing of Bagua.

Ranks import them. Tests need their names alone: FSDP takes three seconds of a core to import.
"""

import torch

NAMES = (
    "DDP with unused parameters",
    "DDP with buffers",
    "DDP with standard hooks",
    "DDP with PowerSGD's hook",
    "DDP with post-local SGD's hook",
    "ZeroRedundancyOptimizer",
    "ZeroRedundancyOptimizer with join",
    "collectives with gradients",
    "FSDP2",
    "FSDP1",
    "DTensor",
    "tensor parallel",
    "like torchtitan",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint, async_save",
    "collectives of objects",
)
"""In the order in which ranks run them."""
LACKS = "this torch has no public fully_shard, or none for CPU tensors"
ABSENT = (
    {}
    if torch.__version__ >= (2, 6) and hasattr(torch.cpu.Stream, "wait_event")  # as rig/torch_parts.py finds it
    else dict.fromkeys(("FSDP2", "like torchtitan"), LACKS)
)
"""Why programs can't run with this version of torch, by name."""


def programs():
    """All, by name."""
    from rig.torch_parts import fully_shard

    from . import checkpoints, ddp, sharded

    found = {**ddp.PROGRAMS, **sharded.PROGRAMS, **checkpoints.PROGRAMS}
    assert tuple(found) == NAMES
    assert (fully_shard is None) == bool(ABSENT)
    return found
