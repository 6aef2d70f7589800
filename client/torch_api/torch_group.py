"""Methods of torch's process groups: ``compat.torch_group``."""

from bagua.torch_api.compat.torch_group import (
    bagua_get_global_communicator,
    bagua_get_inter_node_communicator,
    bagua_get_intra_node_communicator,
    bagua_patch,
    bagua_pg,
    install,
)

__all__ = [
    "bagua_get_global_communicator",
    "bagua_get_inter_node_communicator",
    "bagua_get_intra_node_communicator",
    "bagua_patch",
    "bagua_pg",
    "install",
]
