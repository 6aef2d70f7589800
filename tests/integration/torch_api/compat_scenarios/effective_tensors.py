"""Algorithms that exchange tensors of their own, given by closures: momentum, in the manner of the original's QAdam."""

from __future__ import annotations

from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.tensor import BaguaTensor
from compat_scenarios.own_algorithm import RATE, Reified
from compat_scenarios.support import (
    batch,
    check_equal,
    loss,
    scenario,
    seeded,
)


class MomentumOptimizer(torch.optim.Optimizer):
    """x -= lr m, with m = b m + (1-b) g made here for ``warmup`` steps, and elsewhere after that."""

    def __init__(self, parameters: Any, warmup: int = 2) -> None:
        super().__init__(parameters, {"lr": RATE, "beta": 0.9})
        self.warmup = warmup
        self.step_id = 0
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum"] = torch.zeros_like(parameter.detach())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter]["momentum"]
            if self.step_id < self.warmup:
                momentum.mul_(0.9).add_(parameter.grad, alpha=0.1)
            parameter.add_(momentum, alpha=-RATE)
        self.step_id += 1


class MomentumImpl(AlgorithmImpl):
    """Gradients are averaged for some steps, then momentum; in the manner of the original's QAdam."""

    def __init__(self, process_group: Any, optimizer: MomentumOptimizer) -> None:
        super().__init__(process_group)
        self.optimizer = optimizer
        self.resets = 0

    @property
    def warming_up(self) -> bool:
        return self.optimizer.step_id < self.optimizer.warmup

    def need_reset(self) -> bool:
        return self.optimizer.step_id == self.optimizer.warmup

    def init_tensors(self, bagua_ddp: Any) -> list[BaguaTensor]:
        self.resets += 1
        tensors = []
        for name, parameter in reversed(bagua_ddp.bagua_build_params()):
            if self.warming_up:
                registered = parameter.bagua_ensure_grad().ensure_bagua_tensor(
                    name,
                    bagua_ddp.bagua_module_name,
                    getter_closure=lambda one: one.grad,
                    setter_closure=lambda one, tensor: setattr(one, "grad", tensor),
                )
            else:
                states = self.optimizer.state

                def replace(one: torch.Tensor, tensor: torch.Tensor, states: Any = states) -> None:
                    states[one]["momentum"] = tensor

                registered = parameter.ensure_bagua_tensor(
                    name,
                    bagua_ddp.bagua_module_name,
                    getter_closure=lambda one, states=states: states[one]["momentum"],
                    setter_closure=replace,
                )
            tensors.append(registered)
        self._communication_tensor_names = {tensor.bagua_tensor_name for tensor in tensors}
        return tensors

    def tensors_to_buckets(self, tensors: list[list[BaguaTensor]], do_flatten: bool) -> list[BaguaBucket]:
        alignment = self.process_group.get_global_communicator().nranks()
        return [
            BaguaBucket(bucket, flatten=do_flatten, name=str(index), alignment=alignment)
            for index, bucket in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        if self.warming_up:
            bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)
            return

        def momentum(name: str) -> None:
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(0.9).add_(tensor.grad, alpha=0.1)

        bucket.append_python_op(momentum, group=self.process_group)
        bucket.append_centralized_synchronous_op(average=True, scattergather=True, group=self.process_group)

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        def hook(parameter_name: str, parameter: torch.nn.Parameter) -> None:
            parameter.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        return bagua_ddp._bagua_backend.wait_pending_comm_ops


@scenario
def momentum_as_effective_tensor() -> None:
    for options in ({}, {"do_flatten": False}):
        made: list[MomentumOptimizer] = []

        def optimizer(parameters: Any, made: list[MomentumOptimizer] = made) -> MomentumOptimizer:
            made.append(MomentumOptimizer(parameters))
            return made[-1]

        model = seeded(seed=bagua.get_rank())
        mine = optimizer(model.parameters())
        model.with_bagua([mine], Reified(MomentumImpl, mine), **options)
        reference = seeded()
        other = MomentumOptimizer(reference.parameters(), warmup=100)
        n = bagua.get_world_size()
        for step in range(6):
            other.zero_grad()
            (sum(loss(reference, rank, step) for rank in range(n)) / n).backward()
            other.step()
            mine.zero_grad()
            loss(model, bagua.get_rank(), step).backward()
            mine.step()
        check_equal(model, reference)
        assert model.bagua_algorithm.resets == 2
        for bucket in model.bagua_buckets:
            assert isinstance(bucket, BaguaBucket) and (options or bucket.check_flatten())
            assert sum(map(torch.Tensor.numel, bucket.tensors)) % n == 0 or bucket.padding_tensor is not None


@scenario
def a_pass_that_failed_leaves_no_marks() -> None:
    """With buckets of momentum: what was marked before the exception does not count afterwards."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("in backward")

    model = seeded()
    mine = MomentumOptimizer(model.parameters(), warmup=0)
    mine.step_id = 1
    model.with_bagua([mine], Reified(MomentumImpl, mine))
    assert all(isinstance(bucket, BaguaBucket) for bucket in model.bagua_buckets)
    reference = seeded()
    other = MomentumOptimizer(reference.parameters(), warmup=100)
    rank, n = bagua.get_rank(), bagua.get_world_size()
    if n > 1 and len(model.bagua_buckets) > 1:
        return  # a bucket may be under way: then the next pass raises, which reducers' tests cover
    hidden = model.first(batch(rank, 9, 5, 10))
    try:
        model.second(Broken.apply(hidden)).sum().backward()
    except ArithmeticError:
        pass
    for step in range(2):
        (sum(loss(reference, one, step) for one in range(n)) / n).backward()
        other.step()
        other.zero_grad()
        mine.zero_grad()
        loss(model, rank, step).backward()
        mine.step()
    check_equal(model, reference)
