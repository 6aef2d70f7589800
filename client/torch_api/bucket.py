"""Buckets of registered tensors under the path of the original."""

from bagua.torch_api.data_parallel.operations import BucketOperations
from bagua.torch_api.data_parallel.registered_bucket import BaguaBucket

__all__ = ["BaguaBucket", "BucketOperations"]
