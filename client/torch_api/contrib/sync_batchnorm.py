"""Synchronised BatchNorm under the path of the original: ``layers.sync_batchnorm``."""

from bagua.torch_api.layers.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]
