"""Groups gradients: those of a group share a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

SMALLEST_BUCKET_BYTES = 256 << 10
FIRST_BUCKET_BYTES = 1 << 20
PARTS = 6


def bucket_bytes(total: int, wanted: int, explicit: bool) -> int:
    """Size of buckets for a model of ``total`` bytes of gradients.

    ``wanted`` if the user asked for it. Otherwise a small model gets smaller buckets: with a single one, nothing
    could be exchanged before backward ends.
    """
    return wanted if explicit else min(wanted, max(SMALLEST_BUCKET_BYTES, total // PARTS))


def group_tensors(
    tensors: Sequence[torch.Tensor], limit: int, first_limit: int = FIRST_BUCKET_BYTES
) -> list[list[torch.Tensor]]:
    """Cuts ``tensors``, given in the order in which their gradients come, into groups of one dtype and about
    ``limit`` bytes.

    A group is closed when one more tensor would exceed the limit. The first group is closed sooner, by
    ``first_limit``: exchange begins early. Groups come in the order in which they are complete.
    """
    open_groups: dict[torch.dtype, tuple[int, list[torch.Tensor]]] = {}
    last: dict[torch.dtype, int] = {}
    closed: list[tuple[int, list[torch.Tensor]]] = []
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.element_size()
        held, group = open_groups.get(tensor.dtype, (0, []))
        if group and held + size > (limit if closed else min(limit, first_limit)):
            closed.append((last[tensor.dtype], group))
            held, group = 0, []
        group.append(tensor)
        open_groups[tensor.dtype] = held + size, group
        last[tensor.dtype] = index
    closed += [(last[dtype], group) for dtype, (_, group) in open_groups.items()]
    return [group for _, group in sorted(closed, key=lambda item: item[0])]
