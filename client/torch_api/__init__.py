"""The training library, in the names of the original: ``import bagua.torch_api as bagua``.

bagua.init_process_group()
model = model.with_bagua([optimizer], bagua.algorithms.gradient_allreduce.GradientAllReduceAlgorithm())
"""

from bagua.torch_api import (
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
    on_report,
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
from bagua.torch_api.compat.settings import version
from bagua.torch_api.compat.uneven import join
from bagua.torch_api.distributed import BaguaModule
from bagua.torch_api.env import get_local_rank, get_local_size, get_node_rank, get_rank, get_world_size
from bagua.torch_api.notebook import notebook_launcher
from bagua.torch_api.tensor import BaguaTensor
from bagua.torch_api.train.ddp_hook import ddp_hook

distributed.install()
torch_group.install()
tensor.install()


__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "ReduceOp",
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
    "ddp_hook",
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
    "join",
    "model_parallel",
    "moe",
    "notebook_launcher",
    "on_membership_change",
    "on_report",
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
