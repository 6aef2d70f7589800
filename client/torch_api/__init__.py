"""The training library, in the names of the original: ``import bagua.torch_api as bagua``.

bagua.init_process_group()
model = model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
"""

import torch as _torch

from bagua.torch_api import (
    _fork,
    _linux,
    algorithms,
    bucket,
    checkpoint,
    communication,
    contrib,
    data_parallel,
    distributed,
    env,
    model_parallel,
    moe,
    tensor,
    torch_group,
    utils,
)
from bagua.torch_api.communication import (
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    destroy_process_group,
    empty,
    gather,
    gather_inplace,
    get_backend,
    init_process_group,
    is_initialized,
    is_newcomer,
    on_membership_change,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    register_state,
    report,
    scatter,
    scatter_inplace,
    send,
    wait_to_join,
)
from bagua.torch_api.distributed import BaguaModule
from bagua.torch_api.env import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size
from bagua.torch_api.tensor import BaguaTensor

version = _torch.__version__
"""Of torch, as in the original. The library's own is ``bagua.__version__``."""

distributed.install()
torch_group.install()
tensor.install()


__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "ReduceOp",
    "_fork",
    "_linux",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "bucket",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "destroy_process_group",
    "empty",
    "env",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "is_newcomer",
    "model_parallel",
    "moe",
    "on_membership_change",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "register_state",
    "report",
    "scatter",
    "scatter_inplace",
    "send",
    "tensor",
    "torch_group",
    "utils",
    "version",
    "wait_to_join",
]
