"""Checkpoints: ``Checkpointer``, and under the paths of the original ``save_checkpoint`` and ``load_checkpoint``."""

from bagua.torch_api.saving.checkpointer import Checkpointer, Resumed
from bagua.torch_api.saving.checkpointing import load_checkpoint, save_checkpoint

__all__ = ["Checkpointer", "Resumed", "load_checkpoint", "save_checkpoint"]
