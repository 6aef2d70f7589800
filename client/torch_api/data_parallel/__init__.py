"""Data parallel training: wrapped models."""

from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua.torch_api.distributed import BaguaModule, with_bagua

__all__ = ["BaguaDistributedDataParallel", "BaguaModule", "with_bagua"]
