"""Methods that process groups of ``torch.distributed`` get when ``bagua.torch_api`` is imported."""

from __future__ import annotations

from typing import Any

from torch import distributed

from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.groups import BaguaProcessGroup, from_torch_group


def bagua_patch(self: Any, stream: Any = None) -> Any:
    """Makes the group of ours with the same ranks, where that has not been done, and returns this group. ``stream``:
    see ``BaguaProcessGroup``."""
    from_torch_group(self, stream)
    return self


def bagua_pg(self: Any) -> BaguaProcessGroup:
    """The group of ours with the same ranks."""
    return from_torch_group(self)


def bagua_get_global_communicator(self: Any) -> Communicator:
    """Returns the communicator of all ranks of the group."""
    return from_torch_group(self).get_global_communicator()


def bagua_get_inter_node_communicator(self: Any) -> Communicator:
    """The group's first rank on each host; NON_COMM_MEMBER on others."""
    return from_torch_group(self).get_inter_node_communicator()


def bagua_get_intra_node_communicator(self: Any) -> Communicator:
    """The group's ranks on this host."""
    return from_torch_group(self).get_intra_node_communicator()


def install() -> None:
    """Gives ``torch.distributed.ProcessGroup`` these methods. Idempotent."""
    if not distributed.is_available():  # torch may be built without it
        return
    group: Any = distributed.ProcessGroup
    group.bagua_pg = property(bagua_pg)
    for method in (
        bagua_patch,
        bagua_get_global_communicator,
        bagua_get_inter_node_communicator,
        bagua_get_intra_node_communicator,
    ):
        setattr(group, method.__name__, method)
