"""Checkpoints under the path of the original: ``saving.checkpointing``."""

from bagua.torch_api.saving.checkpointing import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
