"""The environment of this process, under the path of the original: ``join.environment``."""

from bagua.torch_api.join.environment import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_WAIT_TIMEOUT_S,
    find_free_network_port,
    get_default_bucket_size,
    get_local_rank,
    get_local_size,
    get_master_addr,
    get_node_rank,
    get_rank,
    get_wait_timeout,
    get_world_size,
    read_int,
)

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "DEFAULT_WAIT_TIMEOUT_S",
    "find_free_network_port",
    "get_default_bucket_size",
    "get_local_rank",
    "get_local_size",
    "get_master_addr",
    "get_node_rank",
    "get_rank",
    "get_wait_timeout",
    "get_world_size",
    "read_int",
]
