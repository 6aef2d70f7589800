"""Toolbox beside the exchange of gradients."""

from bagua.torch_api.cache.dataset import CachedDataset
from bagua.torch_api.cache.loader import CacheLoader
from bagua.torch_api.contrib import fuse, sync_batchnorm
from bagua.torch_api.contrib.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from bagua.torch_api.data.balanced_sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler
from bagua.torch_api.data.elastic_sampler import ElasticSampler
from bagua.torch_api.data.learning_rate import scale_lr
from bagua.torch_api.data.token_budget import TokenBudgetBatchSampler
from bagua.torch_api.optim.fuse import fuse_optimizer

__all__ = [
    "CacheLoader",
    "CachedDataset",
    "ElasticSampler",
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "SyncBatchNorm",
    "TokenBudgetBatchSampler",
    "convert_sync_batchnorm",
    "fuse",
    "fuse_optimizer",
    "scale_lr",
    "sync_batchnorm",
]
