"""The wrapped model, as the parts that are given one see it. ``DistributedModel`` is the only one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from bagua.algorithms import AlgorithmImpl, DataParallel
from bagua.base.replica_check import CheckReplicas
from bagua.torch_api.comm.groups import BaguaProcessGroup
from bagua.torch_api.step.bucket import PlanBucket


class Wrapped(DataParallel, Protocol):
    """A wrapped model. ``description``: all that must agree between ranks. ``exchanged``: GRADIENT or WEIGHT."""

    module: torch.nn.Module
    bagua_module_name: str
    bagua_algorithm: AlgorithmImpl
    bagua_optimizers: list[torch.optim.Optimizer]
    bagua_train_step_counter: int
    process_group: BaguaProcessGroup
    parameters_to_ignore: frozenset[str]
    bucket_bytes: int | None
    gradient_as_bucket_view: bool
    check_replicas: CheckReplicas
    description: dict[str, object]
    exchanged: str
    is_sharded: bool

    @property
    def bagua_buckets(self) -> Sequence[PlanBucket]: ...
    @property
    def steps_in_backward(self) -> bool: ...
    def trained(self) -> list[tuple[str, torch.nn.Parameter]]: ...
    def trained_beside_buckets(self) -> list[tuple[str, torch.nn.Parameter]]: ...

    def begin_anew(self, with_optimizers: bool = True) -> None:
        """Parameters, and optimizers if asked for, become rank 0's; tensors, buckets, plans and hooks are made anew."""
        ...

    def recut(self, cuts: list[list[str]]) -> bool: ...

    def tell_newcomers(self) -> dict[str, Any]:
        """Returns how far it is, as plain data."""
        ...

    def follow_as_newcomer(self, told: dict[str, Any]) -> None:
        """Makes tensors, buckets and plans again as another rank has them, which told this."""
        ...

    def go_back(self, told: dict[str, Any]) -> None:
        """Makes tensors, buckets and plans again as they were when this was told. All ranks do."""
        ...

    def gone_back(self, ranks: int, anew: bool) -> None:
        """State is that of so many ranks from now on: the algorithm follows, where there are others. ``anew``: it is
        that of another algorithm."""
        ...
