"""Groups gradients: those of a group share a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagua.torch_api.comm.shards import even_share
from bagua.tuning.grouping import FIRST_BUCKET_BYTES, group


def group_tensors(
    tensors: Sequence[torch.Tensor], limit: int, first_limit: int = FIRST_BUCKET_BYTES, filled: bool = False
) -> list[list[torch.Tensor]]:
    """Cuts ``tensors``, given in the order in which their gradients come, as ``bagua.tuning.grouping.group`` does.
    Ranks of an island cut alike, though their parts of a parameter may differ."""
    sizes = [(even_share(tensor) * tensor.element_size(), tensor.dtype) for tensor in tensors]
    return [[tensors[number] for number in numbers] for numbers in group(sizes, limit, first_limit, filled)]
