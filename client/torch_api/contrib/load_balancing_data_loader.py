"""Samplers that balance the load, under the path of the original."""

from bagua.torch_api.data.balanced_sampler import LoadBalancingDistributedBatchSampler, LoadBalancingDistributedSampler

__all__ = ["LoadBalancingDistributedBatchSampler", "LoadBalancingDistributedSampler"]
