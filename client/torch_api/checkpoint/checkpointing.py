"""A module of the original's: see ``bagua.torch_api.saving``."""

from bagua.torch_api.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
