"""``CacheLoader``, under the path of the original."""

from bagua.torch_api.cache.loader import CacheLoader, CacheStatistics

__all__ = ["CacheLoader", "CacheStatistics"]
