"""The rank's own part of low-precision decentralised averaging in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from bagua.torch_api.comm.groups import BaguaProcessGroup


class RingReplicas:
    """Slots of one bucket: ``current`` (x), ``replicas`` (W, L, R), ``messages`` (d, and what own, left and right
    messages decode to). Only the first rank of each host keeps replicas when the ring is one of hosts."""

    def __init__(
        self,
        current: str,
        replicas: Sequence[str],
        messages: Sequence[str],
        group: BaguaProcessGroup,
        hierarchical: bool,
    ) -> None:
        self._current = current
        self._replicas = replicas
        self._messages = messages
        everyone = group.get_global_communicator()
        mine = everyone.ranks[everyone.rank()]
        self._takes_part = not hierarchical or any(host[0] == mine for host in group.hosts)
        self._alone = len(group.hosts if hierarchical else group.ranks) == 1

    def take_difference(self, bucket: Any) -> None:
        """d = x + L/3 + R/3 - 5/3 W."""
        if not self._takes_part:
            return
        weight, left, right = (bucket.slot(name) for name in self._replicas)
        difference = bucket.slot(self._messages[0])
        torch.add(bucket.slot(self._current), left, alpha=1 / 3, out=difference)
        difference.add_(right, alpha=1 / 3).sub_(weight, alpha=5 / 3)

    def apply(self, bucket: Any) -> None:
        """x = W = W + own message; the replicas of the neighbours follow theirs. Alone, one is one's own neighbour."""
        if not self._takes_part:
            return
        weight, left, right = (bucket.slot(name) for name in self._replicas)
        own, from_left, from_right = (bucket.slot(name) for name in self._messages[1:])
        left.add_(own if self._alone else from_left)
        right.add_(own if self._alone else from_right)
        weight.add_(own)
        bucket.slot(self._current).copy_(weight)
