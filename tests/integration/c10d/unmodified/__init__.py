"""Programs for torch.distributed that know nothing of Bagua."""

from . import ddp

PROGRAMS = {**ddp.PROGRAMS}
