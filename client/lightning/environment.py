"""The environment of a process, as Lightning asks for it: the variables of ``bagua run`` and torchrun.

In an elastic job they change with the members, so they are read each time.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import bagua.torch_api as bagua
from bagua.torch_api.job.environment import get_master_addr, read_int

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def is_rank() -> bool:
    """True if a launcher has started this process as a rank: ``bagua run``, a node daemon, or torchrun."""
    return all(name in os.environ for name in NEEDED)


def bagua_environment(base: type[ClusterEnvironment]) -> type[ClusterEnvironment]:
    """``BaguaEnvironment`` over the ClusterEnvironment of one package of Lightning."""

    class BaguaEnvironment(base):  # type: ignore[misc]
        """Ranks that ``bagua run``, a node daemon or torchrun has started. ``Trainer`` starts no processes."""

        @property
        def creates_processes_externally(self) -> bool:
            return True

        @property
        def main_address(self) -> str:
            return get_master_addr()

        @property
        def main_port(self) -> int:
            return read_int("MASTER_PORT", 0)

        @staticmethod
        def detect() -> bool:
            return is_rank()

        def world_size(self) -> int:
            return bagua.get_world_size()

        def set_world_size(self, size: int) -> None:
            """Does nothing: the launcher decides."""

        def global_rank(self) -> int:
            return bagua.get_rank()

        def set_global_rank(self, rank: int) -> None:
            """Does nothing: the launcher decides."""

        def local_rank(self) -> int:
            return bagua.get_local_rank()

        def node_rank(self) -> int:
            return bagua.get_node_rank()

    return BaguaEnvironment
