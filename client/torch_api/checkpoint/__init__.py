"""Checkpoints: ``Checkpointer``, and under the paths of the original ``save_checkpoint`` and ``load_checkpoint``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bagua.torch_api.saving.checkpointing import load_checkpoint, save_checkpoint

if TYPE_CHECKING:
    from bagua.torch_api.saving.checkpointer import Checkpointer, Resumed

__all__ = ["Checkpointer", "Resumed", "load_checkpoint", "save_checkpoint"]


def __getattr__(name: str) -> Any:
    """Torch's distributed checkpoints take most of a second to import: programs that use them pay for that."""
    if name not in ("Checkpointer", "Resumed"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from bagua.torch_api.saving import checkpointer

    return getattr(checkpointer, name)
