"""The process group that Accelerate finds."""

from __future__ import annotations

import os

import torch
from torch import distributed

import bagua.c10d  # noqa: F401 - registers the backend: torch before 2.5 does not do so by itself
from bagua.base.errors import ConfigError

USE_CPU = "ACCELERATE_USE_CPU"
BACKEND = "bagua"


def begin() -> bool:
    """Initialises ``torch.distributed`` with backend "bagua" if a launcher has started this process as one of several
    ranks. Returns whether it is up now. Where there is no GPU, Accelerate is told to use processors: otherwise each
    rank would train alone.

    Raises ConfigError if ``torch.distributed`` is up with another backend.
    """
    if distributed.is_initialized():
        found = str(distributed.get_backend_config())
        if BACKEND not in found:
            raise ConfigError(
                f"torch.distributed is up already, with backend {found}: import bagua.accelerate before Accelerate's "
                "PartialState, Accelerator or TrainingArguments are made. [BG410]"
            )
        return True
    if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return False
    if not torch.cuda.is_available():
        os.environ.setdefault(USE_CPU, "true")
        if os.environ[USE_CPU].lower() in ("false", "0", "no"):  # `accelerate launch` without --cpu says so
            os.environ[USE_CPU] = "true"
    distributed.init_process_group(BACKEND)
    return True
