"""Programs for torch.distributed that know nothing of Bagua."""

from . import checkpoints, ddp, sharded

PROGRAMS = {**ddp.PROGRAMS, **sharded.PROGRAMS, **checkpoints.PROGRAMS}
ALL = {**PROGRAMS, **ddp.SLOW}
"""With those that take longer, or want more ranks."""
