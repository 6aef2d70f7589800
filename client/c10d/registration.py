"""Makes the name "bagua" known to ``torch.distributed``.

torch calls ``register`` at the end of its own import (entry point in the group ``torch.backends``, since torch 2.5). So
nothing heavy may be imported here, and torch only within the function: this module may be what imports torch.
"""

from __future__ import annotations

from typing import Any

from bagua.c10d.names import NAME

DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Registers the backend once, for CPU and CUDA tensors. Nothing where this torch has no ``torch.distributed``."""
    from torch import distributed

    if not distributed.is_available() or NAME.upper() in distributed.Backend._plugins:
        return
    distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)


def _create(options: Any, backend_options: Any = None) -> Any:
    from bagua.c10d.backend import create

    return create(options, backend_options)
