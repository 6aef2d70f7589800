"""``DistributedDataParallel`` under the path of the original: ``compat.distributed_data_parallel``."""

from bagua.torch_api.compat.distributed_data_parallel import (
    DEFAULT_BUCKET_MB,
    DistributedDataParallel,
    DistributedDataParallel_V1_9_0,
    check_devices,
    to_bagua_process_group,
)

DistributedDataParallel_V1_9_0_Interface = DistributedDataParallel_V1_9_0

__all__ = [
    "DEFAULT_BUCKET_MB",
    "DistributedDataParallel",
    "DistributedDataParallel_V1_9_0",
    "DistributedDataParallel_V1_9_0_Interface",
    "check_devices",
    "to_bagua_process_group",
]
