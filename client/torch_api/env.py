"""The environment of this process, under the path of the original: ``job.environment``, ``compat.settings``."""

from bagua.torch_api.compat.settings import (
    get_autotune_level,
    get_autotune_max_samples,
    get_autotune_sampling_confidence_time_s,
    get_autotune_server_wait_time,
    get_autotune_warmup_time_s,
    get_bagua_service_port,
    get_is_output_autotune_log,
    is_report_metrics_switch_on,
)
from bagua.torch_api.job.environment import (
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
    "get_autotune_level",
    "get_autotune_max_samples",
    "get_autotune_sampling_confidence_time_s",
    "get_autotune_server_wait_time",
    "get_autotune_warmup_time_s",
    "get_bagua_service_port",
    "get_default_bucket_size",
    "get_is_output_autotune_log",
    "get_local_rank",
    "get_local_size",
    "get_master_addr",
    "get_node_rank",
    "get_rank",
    "get_wait_timeout",
    "get_world_size",
    "is_report_metrics_switch_on",
    "read_int",
]
