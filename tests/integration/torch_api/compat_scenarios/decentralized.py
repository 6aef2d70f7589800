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


def averaged(values: list[list[torch.Tensor]], mode: str, step: int) -> list[list[torch.Tensor]]:
    n = len(values)
    if mode == "all" or n == 1:
        return [mean(values)] * n
    return [mean([values[rank], values[partner(rank, n, step)]]) for rank in range(n)]


@scenario
def decentralised_with_copy_back() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    for mode, flat in (("all", True), ("all", False), ("shift_one", True)):
        if mode == "shift_one" and n % 2 and n > 1:
            try:
                start(Reified(DecentralizedImpl, mode, False))
            except ValueError as error:
                assert "odd" in str(error) or "even" in str(error)
                continue
            raise AssertionError("an odd number of ranks was paired")
        model, optimizer = start(Reified(DecentralizedImpl, mode, False), do_flatten=flat)
        simulated = replicas()
        for step in range(5):
            before = [[parameter.detach().clone() for parameter in one.parameters()] for one in simulated]
            slopes = gradients(simulated, step)
            for one, weights, slope in zip(simulated, averaged(before, mode, step), slopes, strict=True):
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
            hierarchical=False,
            compression=None,
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


@scenario
def ring_of_replicas() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model, optimizer = start(Reified(RingImpl))
    simulated = replicas()
    weights = [[parameter.detach().clone() for parameter in one.parameters()] for one in simulated]
    for step in range(4):
        slopes = gradients(simulated, step)
        moved = []
        for position, one in enumerate(simulated):
            left, right = weights[(position - 1) % n], weights[(position + 1) % n]
            moved.append(
                [
                    parameter.detach() - RATE * gradient + a / 3 + b / 3 - 2 / 3 * own
                    for parameter, gradient, a, b, own in zip(
                        one.parameters(), slopes[position], left, right, weights[position], strict=True
                    )
                ]
            )
        weights = moved
        for one, values in zip(simulated, weights, strict=True):
            with torch.no_grad():
                for parameter, value in zip(one.parameters(), values, strict=True):
                    parameter.copy_(value)
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
        check_equal(model, simulated[rank], 1e-4)
    assert len(model.bagua_buckets) >= 1
    for bucket in model.bagua_buckets:
        torch.testing.assert_close(bucket._weight, bucket.flattened_tensor())
