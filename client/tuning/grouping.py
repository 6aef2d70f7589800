"""The default cut of a model into buckets: by bytes alone, in the order in which gradients come."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

DEFAULT_BYTES = 10 << 20
DEVICE_BYTES = 25 << 20  # on a GPU each operation costs launches, so buckets are as large as DDP's, and as few
SMALLEST_BUCKET_BYTES = 256 << 10
FIRST_BUCKET_BYTES = 1 << 20
PARTS = 6


def bucket_bytes(total: int, wanted: int = DEFAULT_BYTES, explicit: bool = False, on_device: bool = False) -> int:
    """Size of buckets for a model of ``total`` bytes of gradients.

    ``wanted`` if the user asked for it. Otherwise a small model gets smaller buckets: with a single one, nothing
    could be exchanged before backward ends. ``on_device``: a model on a GPU, where the first bucket alone is small.
    """
    if on_device and not explicit:
        return DEVICE_BYTES
    return wanted if explicit else min(wanted, max(SMALLEST_BUCKET_BYTES, total // PARTS))


def group(
    tensors: Sequence[tuple[int, Hashable]], limit: int, first_limit: int = FIRST_BUCKET_BYTES, filled: bool = False
) -> list[list[int]]:
    """Cuts tensors, (bytes, dtype) each in the order in which their gradients come, into groups of one dtype and about
    ``limit`` bytes. Returns their numbers.

    A group is closed when one more tensor would exceed the limit, or, with ``filled``, by the tensor with which it
    reaches the limit, as DDP does it: groups are fewer, and a bias travels with the matrix that comes after it. The
    first group is closed sooner, by ``first_limit``: exchange begins early. Groups come in the order in which they are
    complete.
    """
    open_groups: dict[Hashable, tuple[int, list[int]]] = {}
    closed: list[list[int]] = []
    for index, (size, dtype) in enumerate(tensors):
        held, members = open_groups.get(dtype, (0, []))
        now = held if filled else held + size - 1  # - 1: what fits exactly does not close a group yet
        if members and now >= (limit if closed else min(limit, first_limit)):
            closed.append(members)
            held, members = 0, []
        members.append(index)
        open_groups[dtype] = held + size, members
    closed += [members for _, members in open_groups.values()]  # the last groups never reach a limit
    return sorted(closed, key=lambda members: members[-1])
