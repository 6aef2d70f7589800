"""Everything that programs import is where it was: names of the original, and of version 0.1 as it first was."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import bagua.torch_api as bagua

VERSION_0_1: dict[str, list[str]] = json.loads(Path(__file__).with_name("public_names_0_1.json").read_text())

ORIGINAL: dict[str, str] = {
    "bagua.torch_api": "get_backend init_process_group send recv allgather allgather_inplace allreduce "
    "allreduce_inplace alltoall alltoall_inplace alltoall_v alltoall_v_inplace barrier broadcast gather gather_inplace "
    "reduce reduce_inplace reduce_scatter reduce_scatter_inplace scatter scatter_inplace ReduceOp BaguaModule "
    "BaguaTensor get_local_rank get_local_size get_rank get_world_size communication algorithms data_parallel",
    "bagua.torch_api.communication": "is_initialized new_group from_torch_group broadcast_object broadcast_coalesced "
    "allreduce_coalesced_inplace BaguaProcessGroup get_communicator _get_default_group _rank_not_in_group "
    "_rank_not_in_comm _bagua_backend_comm _pg_group_ranks _pg_map _torch_to_bagua_pg_map CommMember comm "
    "start_autotune_server get_hyperparameters_service_client get_backend init_process_group send recv ReduceOp",
    "bagua.torch_api.env": "get_rank get_world_size get_local_rank get_local_size get_node_rank get_master_addr "
    "find_free_network_port get_default_bucket_size",
    "bagua.torch_api.data_parallel": "DistributedDataParallel DistributedDataParallel_V1_9_0 to_bagua_process_group "
    "BaguaDistributedDataParallel functional",
    "bagua.torch_api.data_parallel.functional": "all_reduce all_gather reduce_scatter all_to_all",
    "bagua.torch_api.contrib": "LoadBalancingDistributedSampler LoadBalancingDistributedBatchSampler CacheLoader "
    "CachedDataset SyncBatchNorm convert_sync_batchnorm sync_batchnorm fuse fuse_optimizer",
    "bagua.torch_api.checkpoint": "save_checkpoint load_checkpoint",
    "bagua.torch_api.checkpoint.checkpointing": "save_checkpoint load_checkpoint",
    "bagua.torch_api.moe": "MoE is_moe_param",
    "bagua.torch_api.model_parallel": "moe",
    "bagua.torch_api.model_parallel.moe": "MoE is_moe_param",
    "bagua.torch_api.model_parallel.moe.layer": "MoE",
    "bagua.torch_api.model_parallel.moe.experts": "Experts",
    "bagua.torch_api.model_parallel.moe.sharded_moe": "MOELayer TopKGate",
    "bagua.torch_api.model_parallel.moe.utils": "is_moe_param",
    "bagua.torch_api.contrib.sync_batchnorm": "SyncBatchNorm convert_sync_batchnorm",
    "bagua.torch_api.data_parallel.distributed": "DistributedDataParallel DistributedDataParallel_V1_9_0 "
    "to_bagua_process_group",
    "bagua.torch_api.data_parallel.bagua_distributed": "BaguaDistributedDataParallel",
    "bagua.torch_api.distributed": "BaguaModule",
    "bagua.torch_api.bucket": "BaguaBucket",
    "bagua.torch_api.tensor": "BaguaTensor",
    "bagua.torch_api.utils": "flatten unflatten apply_flattened_call apply_flattened_call_all check_contiguous "
    "get_flattened_tensor to_bagua_datatype average_by_removing_extreme_values StatisticalAverage",
    "bagua.torch_api.algorithms": "Algorithm AlgorithmImpl GlobalAlgorithmRegistry",
    "bagua.torch_api.algorithms.base": "Algorithm AlgorithmImpl GlobalAlgorithmRegistry",
    "bagua.torch_api.algorithms.gradient_allreduce": "GradientAllReduceAlgorithm GradientAllReduceAlgorithmImpl",
    "bagua.torch_api.algorithms.bytegrad": "ByteGradAlgorithm ByteGradAlgorithmImpl",
    "bagua.torch_api.algorithms.decentralized": "DecentralizedAlgorithm DecentralizedAlgorithmImpl "
    "LowPrecisionDecentralizedAlgorithm LowPrecisionDecentralizedAlgorithmImpl",
    "bagua.torch_api.algorithms.q_adam": "QAdamAlgorithm QAdamAlgorithmImpl QAdamOptimizer",
    "bagua.torch_api.algorithms.async_model_average": "AsyncModelAverageAlgorithm AsyncModelAverageAlgorithmImpl",
    "bagua.torch_api.contrib.fuse.optimizer": "fuse_optimizer fuse_step is_fused_optimizer calculate_mutual_groups",
    "bagua.torch_api.contrib.load_balancing_data_loader": "LoadBalancingDistributedSampler "
    "LoadBalancingDistributedBatchSampler",
    "bagua.torch_api.contrib.cache_loader": "CacheLoader",
    "bagua.torch_api.contrib.cached_dataset": "CachedDataset",
    "bagua.torch_api.contrib.utils.store": "Store ClusterStore",
    "bagua.torch_api.contrib.utils.redis_store": "RedisStore create_redis_client start_redis_server_cli",
    "bagua_core": "install_deps show_version BaguaTensorPy BaguaBucketPy BaguaCommBackendPy "
    "BaguaSingleCommunicatorPy DecentralizedFullPrecisionSynchronousPy DecentralizedFullPrecisionAsynchronousPy",
}

MEMBERS: list[tuple[Any, str]] = [
    (torch.nn.Module, "with_bagua bagua_module_name bagua_algorithm bagua_optimizers bagua_buckets"),
    (
        torch.Tensor,
        "is_bagua_tensor ensure_bagua_tensor to_bagua_tensor bagua_getter_closure bagua_setter_closure "
        "bagua_backend_tensor bagua_ensure_grad bagua_mark_communication_ready bagua_set_storage bagua_tensor_name "
        "bagua_mark_communication_ready_without_synchronization bagua_module_name bagua_backend _bagua_bucket",
    ),
    (
        distributed.ProcessGroup,
        "bagua_patch bagua_pg bagua_get_global_communicator bagua_get_inter_node_communicator "
        "bagua_get_intra_node_communicator",
    ),
    (
        bagua.communication.Communicator,
        "rank nranks device_id abort check_abort barrier cuda_stream send recv broadcast allreduce allreduce_inplace "
        "reduce reduce_inplace allgather allgather_inplace gather gather_inplace scatter scatter_inplace "
        "reduce_scatter reduce_scatter_inplace alltoall alltoall_inplace alltoall_v alltoall_v_inplace",
    ),
    (
        bagua.communication.BaguaProcessGroup,
        "get_global_communicator get_inter_node_communicator get_intra_node_communicator",
    ),
    (
        bagua.bucket.BaguaBucket,
        "flattened_tensor check_flatten bytes clear_ops append_python_op append_centralized_synchronous_op "
        "append_decentralized_synchronous_op append_low_precision_decentralized_synchronous_op backend_tensor "
        "append_asynchronous_model_average_op backend_bucket padding_tensor",
    ),
    (
        bagua.data_parallel.BaguaDistributedDataParallel,
        "bagua_build_params bagua_buckets autograd_graph_params params_in_use _bagua_backend",
    ),
    (
        bagua.data_parallel.DistributedDataParallel_V1_9_0,
        "forward no_sync require_backward_grad_sync parameters_to_ignore bagua_algorithm bagua_optimizers "
        "bagua_buckets scatter gather join register_comm_hook will_sync_module_buffers",
    ),
    (
        bagua.contrib.LoadBalancingDistributedSampler,
        "set_epoch shuffle_chunks state_dict load_state_dict",
    ),
    (bagua.contrib.LoadBalancingDistributedBatchSampler, "set_epoch generate_batches state_dict load_state_dict"),
    (bagua.contrib.CacheLoader, "get num_keys"),
    (
        bagua.algorithms.AlgorithmImpl,
        "need_reset init_tensors tensors_to_buckets init_operations init_forward_pre_hook init_backward_hook "
        "init_post_backward_hook init_post_optimizer_step_hook",
    ),
]


@pytest.mark.parametrize(("module", "names"), sorted(VERSION_0_1.items()))
def test_names_of_version_0_1(module: str, names: list[str]) -> None:
    found = importlib.import_module(module)
    assert names and [name for name in names if not hasattr(found, name)] == []


@pytest.mark.parametrize(("module", "names"), ORIGINAL.items())
def test_names_of_the_original(module: str, names: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in names.split() if not hasattr(found, name)] == []


@pytest.mark.parametrize(("owner", "names"), MEMBERS)
def test_members(owner: Any, names: str) -> None:
    assert [name for name in names.split() if not hasattr(owner, name)] == []


def test_the_top_folder_of_the_library_holds_facades_alone() -> None:
    """One place for what programs import: no function or class of ours is defined there."""
    folder = Path(bagua.__file__).parent
    for path in [*folder.glob("*.py"), *folder.glob("data_parallel/*.py"), *folder.glob("algorithms/*.py")]:
        defined = [line for line in path.read_text().splitlines() if line.startswith(("class ", "def "))]
        assert defined in ([], ["def __getattr__(name: str) -> NoReturn:"]), path
