"""Data-parallel training under the path of the original."""

import sys

from bagua.torch_api.compat import model as bagua_distributed
from bagua.torch_api.compat.distributed_data_parallel import (
    DistributedDataParallel,
    DistributedDataParallel_V1_9_0,
    to_bagua_process_group,
)
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.compat.module import BaguaModule, with_bagua
from bagua.torch_api.data_parallel import functional

__all__ = [
    "BaguaDistributedDataParallel",
    "BaguaModule",
    "DistributedDataParallel",
    "DistributedDataParallel_V1_9_0",
    "functional",
    "to_bagua_process_group",
    "with_bagua",
]

# Programs import by this path, too.
sys.modules[f"{__name__}.bagua_distributed"] = bagua_distributed
