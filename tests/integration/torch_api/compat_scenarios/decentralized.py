"""Decentralised operations on buckets, as algorithms of the original append them; equal to one process."""

from __future__ import annotations

from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.tensor import BaguaTensor
from compat_scenarios.own_algorithm import RATE, Reified, start
from compat_scenarios.support import (
    check_equal,
    gradients,
    loss,
    mean,
    replicas,
    scenario,
)


class DecentralizedImpl(AlgorithmImpl):
    def __init__(self, process_group: Any, mode: str, hierarchical: bool) -> None:
        super().__init__(process_group)
        self.mode = mode
        self.hierarchical = hierarchical

    def init_tensors(self, bagua_ddp: Any) -> list[BaguaTensor]:
        self.tensors = [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]
        return self.tensors

    def tensors_to_buckets(self, tensors: list[list[BaguaTensor]], do_flatten: bool) -> list[BaguaBucket]:
        everything = [tensor for bucket in tensors for tensor in bucket]
        return [BaguaBucket(everything, flatten=do_flatten, name="0")]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket._peer_weight = bucket.flattened_tensor().ensure_bagua_tensor("peer_weight")
        bucket.clear_ops()
        bucket._operation = bucket.append_decentralized_synchronous_op(
            peer_weight=bucket._peer_weight,
            hierarchical=self.hierarchical,
            peer_selection_mode=self.mode,
            group=self.process_group,
        )

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Any:
        def hook(input: Any) -> None:
            for tensor in self.tensors:
                tensor.bagua_mark_communication_ready()

        return hook

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda parameter_name, parameter: None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        def hook() -> None:
            bagua_ddp._bagua_backend.wait_pending_comm_ops()
            for bucket in bagua_ddp.bagua_buckets:
                bucket._operation.copy_back_peer_weight(bucket.backend_bucket)

        return hook


def partner(position: int, count: int, step: int) -> int:
    half = count // 2
    return (step + position) % half + half if position < half else (position - half - step) % half


def units(hierarchical: bool) -> list[list[int]]:
    """Ranks that act as one: those of a host, or each by itself."""
    if hierarchical:
        return [list(host) for host in bagua.communication._get_default_group().hosts]
    return [[rank] for rank in range(bagua.get_world_size())]


def unit_of(rank: int, among: list[list[int]]) -> int:
    return next(index for index, ranks in enumerate(among) if rank in ranks)


def averaged(
    values: list[list[torch.Tensor]], mode: str, step: int, among: list[list[int]]
) -> list[list[torch.Tensor]]:
    n = len(among)
    if mode == "all":
        return [mean(values)] * len(values)
    found = []
    for rank in range(len(values)):
        own = unit_of(rank, among)
        together = {own, partner(own, n, step)} if n > 1 else {own}
        found.append(mean([values[other] for unit in sorted(together) for other in among[unit]]))
    return found


@scenario
def decentralised_with_copy_back() -> None:
    rank = bagua.get_rank()
    for mode, flat, hierarchical in (
        ("all", True, False),
        ("all", False, False),
        ("all", True, True),
        ("shift_one", True, False),
        ("shift_one", True, True),
    ):
        among = units(hierarchical)
        if mode == "shift_one" and len(among) % 2 and len(among) > 1:
            try:
                start(Reified(DecentralizedImpl, mode, hierarchical))
            except ValueError as error:
                assert "odd" in str(error) or "even" in str(error)
                continue
            raise AssertionError("an odd number was paired")
        model, optimizer = start(Reified(DecentralizedImpl, mode, hierarchical), do_flatten=flat)
        simulated = replicas()
        for step in range(5):
            before = [[parameter.detach().clone() for parameter in one.parameters()] for one in simulated]
            slopes = gradients(simulated, step)
            for one, weights, slope in zip(simulated, averaged(before, mode, step, among), slopes, strict=True):
                with torch.no_grad():
                    for parameter, weight, gradient in zip(one.parameters(), weights, slope, strict=True):
                        parameter.copy_(weight - RATE * gradient)
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            check_equal(model, simulated[rank])
        (bucket,) = model.bagua_buckets
        assert bucket._peer_weight.numel() == sum(parameter.numel() for parameter in model.parameters())


class RingImpl(AlgorithmImpl):
    """Low precision in a ring, with the default bucketing."""

    def __init__(self, process_group: Any, hierarchical: bool, compression: str | None) -> None:
        super().__init__(process_group)
        self.hierarchical = hierarchical
        self.compression = compression

    def init_tensors(self, bagua_ddp: Any) -> list[BaguaTensor]:
        return [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket._weight = bucket.flattened_tensor().to_bagua_tensor("weight")
        bucket._left_peer_weight = bucket.flattened_tensor().to_bagua_tensor("left_peer_weight")
        bucket._right_peer_weight = bucket.flattened_tensor().to_bagua_tensor("right_peer_weight")
        bucket.clear_ops()
        bucket.append_low_precision_decentralized_synchronous_op(
            weight=bucket._weight,
            left_peer_weight=bucket._left_peer_weight,
            right_peer_weight=bucket._right_peer_weight,
            hierarchical=self.hierarchical,
            compression=self.compression,
            group=self.process_group,
        )

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda parameter_name, parameter: None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda: None

    def init_post_optimizer_step_hook(self, bagua_ddp: Any) -> Any:
        def hook(optimizer: torch.optim.Optimizer) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.is_bagua_tensor():
                        parameter.bagua_mark_communication_ready()
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook


def ring_step(
    weights: list[list[torch.Tensor]], moved: list[list[torch.Tensor]], among: list[list[int]]
) -> list[list[torch.Tensor]]:
    """x + L/3 + R/3 - 2/3 W for each rank, with x the mean of what its unit's ranks hold after their steps."""
    n = len(among)
    found = []
    for rank in range(len(weights)):
        own = unit_of(rank, among)
        left, right = weights[among[(own - 1) % n][0]], weights[among[(own + 1) % n][0]]
        x = mean([moved[other] for other in among[own]])
        found.append([v + a / 3 + b / 3 - 2 / 3 * w for v, a, b, w in zip(x, left, right, weights[rank], strict=True)])
    return found


def check_replicas(bucket: Any, among: list[list[int]]) -> None:
    """The first rank of each unit has exact copies of itself and of its neighbours, bit for bit."""
    own = bucket.flattened_tensor()
    everyone = torch.zeros(bagua.get_world_size(), own.numel())
    bagua.allgather(own, everyone)
    me = unit_of(bagua.get_rank(), among)
    if bagua.get_rank() != among[me][0]:
        return
    assert torch.equal(bucket._weight, own)
    for replica, unit in ((bucket._left_peer_weight, me - 1), (bucket._right_peer_weight, me + 1)):
        for rank in among[unit % len(among)]:
            assert torch.equal(replica, everyone[rank]), f"the copy of rank {rank} is not what it holds"


@scenario
def ring_of_replicas() -> None:
    """Each rank by itself and hosts as one, as they are and in eight bits: those are a little off, and agree."""
    rank = bagua.get_rank()
    for hierarchical, compression, tolerance in (
        (False, None, 1e-4),
        (True, None, 1e-4),
        (False, "MinMaxUInt8", 0.02),
        (True, "MinMaxUInt8", 0.02),
    ):
        among = units(hierarchical)
        model, optimizer = start(Reified(RingImpl, hierarchical, compression))
        simulated = replicas()
        weights = [[parameter.detach().clone() for parameter in one.parameters()] for one in simulated]
        for step in range(4):
            slopes = gradients(simulated, step)
            moved = [
                [x.detach() - RATE * slope for x, slope in zip(one.parameters(), own, strict=True)]
                for one, own in zip(simulated, slopes, strict=True)
            ]
            weights = ring_step(weights, moved, among)
            for one, values in zip(simulated, weights, strict=True):
                with torch.no_grad():
                    for parameter, value in zip(one.parameters(), values, strict=True):
                        parameter.copy_(value)
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            check_equal(model, simulated[rank], tolerance)
        assert len(model.bagua_buckets) >= 1
        for bucket in model.bagua_buckets:
            check_replicas(bucket, among)
