"""Programs for torch.distributed that know nothing of Bagua."""

from rig.torch_parts import fully_shard

from . import checkpoints, ddp, sharded

PROGRAMS = {**ddp.PROGRAMS, **sharded.PROGRAMS, **checkpoints.PROGRAMS}
ALL = {**PROGRAMS, **ddp.SLOW}
"""With those that take longer, or want more ranks."""
LACKS = "this torch has no public fully_shard, or none for CPU tensors"
ABSENT = {} if fully_shard else dict.fromkeys(("FSDP2", "like torchtitan"), LACKS)
"""Why programs can't run with this version of torch, by name."""
