"""The fused optimizer's dotted path in the original."""

from bagua.torch_api.contrib.fuse import optimizer

__all__ = ["optimizer"]
