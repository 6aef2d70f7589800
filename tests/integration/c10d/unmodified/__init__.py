"""Programs for torch.distributed that know nothing of Bagua."""

from torch.distributed import fsdp

from . import ddp

PROGRAMS = {**ddp.PROGRAMS}
if hasattr(fsdp, "fully_shard"):  # with public DTensors: since torch 2.6
    from . import checkpoints, sharded

    PROGRAMS |= {**sharded.PROGRAMS, **checkpoints.PROGRAMS}
ALL = {**PROGRAMS, **ddp.SLOW}
"""With those that take longer, or want more ranks."""
