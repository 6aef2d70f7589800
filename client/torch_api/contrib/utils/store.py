"""Stores by key, under the path of the original."""

from bagua.torch_api.cache.store import ClusterStore, Store, StoreError

__all__ = ["ClusterStore", "Store", "StoreError"]
