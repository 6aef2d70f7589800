"""Data parallel training: wrapped models."""

from bagua.torch_api.data_parallel import functional
from bagua.torch_api.data_parallel.bagua_distributed import BaguaDistributedDataParallel
from bagua.torch_api.data_parallel.distributed import (
    DistributedDataParallel,
    DistributedDataParallel_V1_9_0,
    to_bagua_process_group,
)
from bagua.torch_api.distributed import BaguaModule, with_bagua

__all__ = [
    "BaguaDistributedDataParallel",
    "BaguaModule",
    "DistributedDataParallel",
    "DistributedDataParallel_V1_9_0",
    "functional",
    "to_bagua_process_group",
    "with_bagua",
]
