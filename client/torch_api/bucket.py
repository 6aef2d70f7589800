"""Buckets of registered tensors under the path of the original: ``compat.bucket``."""

from bagua.torch_api.compat.bucket import BaguaBucket
from bagua.torch_api.compat.operations import BucketOperations

__all__ = ["BaguaBucket", "BucketOperations"]
