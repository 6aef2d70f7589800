"""``CachedDataset``, under the path of the original."""

from bagua.torch_api.cache.dataset import CachedDataset

__all__ = ["CachedDataset"]
