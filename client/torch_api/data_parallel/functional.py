"""``layers.functional``, under the path that it has in the original Bagua."""

from bagua.torch_api.communication import ReduceOp
from bagua.torch_api.layers.functional import (
    DIFFERENTIABLE,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    torch_reduce_op_to_bagua,
)

__all__ = [
    "DIFFERENTIABLE",
    "ReduceOp",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
    "torch_reduce_op_to_bagua",
]
