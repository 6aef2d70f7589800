"""Weights averaged in the background, by a thread of the user's; and back to an algorithm of ours."""

from __future__ import annotations

import threading
from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from bagua.torch_api.tensor import BaguaTensor
from compat_scenarios.decentralized import DecentralizedImpl
from compat_scenarios.own_algorithm import Reified, start
from compat_scenarios.python_operations import ScaledImpl
from compat_scenarios.support import (
    Net,
    loss,
    scenario,
)


class BackgroundImpl(AlgorithmImpl):
    """Gradients stay this rank's own; weights are averaged in a thread."""

    def init_tensors(self, bagua_ddp: Any) -> list[BaguaTensor]:
        return [
            parameter.ensure_bagua_tensor(name, bagua_ddp.bagua_module_name)
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]

    def tensors_to_buckets(self, tensors: list[list[BaguaTensor]], do_flatten: bool) -> list[BaguaBucket]:
        return [BaguaBucket([tensor for bucket in tensors for tensor in bucket], flatten=do_flatten, name="0")]

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()
        bucket._async_op = bucket.append_asynchronous_model_average_op("all", group=self.process_group)

    def init_forward_pre_hook(self, bagua_ddp: Any) -> Any:
        return lambda input: [bucket._async_op.lock_weight() for bucket in bagua_ddp.bagua_buckets]

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda parameter_name, parameter: None

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        return lambda: [bucket._async_op.unlock_weight() for bucket in bagua_ddp.bagua_buckets]


@scenario
def weights_averaged_in_a_thread() -> None:
    rank = bagua.get_rank()
    model, optimizer = start(Reified(BackgroundImpl))
    (bucket,) = model.bagua_buckets
    rounds = 0

    def loop() -> None:
        nonlocal rounds
        while bucket._async_op.get_status():
            for tensor in bucket.tensors:
                tensor.bagua_mark_communication_ready_without_synchronization()
            bagua.get_backend(model.bagua_module_name).wait_pending_comm_ops()
            rounds += 1

    worker = threading.Thread(target=loop)
    worker.start()
    for step in range(100):  # autograd complains if the thread writes weights that are locked
        optimizer.zero_grad()
        loss(model, rank, step).backward()
        optimizer.step()
    bucket._async_op.abort()
    worker.join()
    assert rounds >= 1 and not bucket._async_op.get_status()
    # Alone, all ranks now average what they have: after one more round they agree.
    bagua.barrier()
    bucket._async_op.reset()
    for tensor in bucket.tensors:
        tensor.bagua_mark_communication_ready_without_synchronization()
    bagua.get_backend(model.bagua_module_name).wait_pending_comm_ops()
    mine = bucket.flattened_tensor()
    everyone = torch.zeros(bagua.get_world_size(), mine.numel())
    bagua.allgather(mine, everyone)
    torch.testing.assert_close(everyone, everyone[:1].expand_as(everyone), rtol=1e-5, atol=1e-6)


@scenario
def switching_back_to_an_algorithm_of_ours() -> None:
    from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm

    rank, n = bagua.get_rank(), bagua.get_world_size()
    model, optimizer = start(Reified(DecentralizedImpl, "all", True))
    loss(model, rank, 0).backward()
    for algorithm in (GradientAllReduceAlgorithm(), Reified(ScaledImpl), GradientAllReduceAlgorithm()):
        model.with_bagua([optimizer], algorithm)
        optimizer.zero_grad()
        reference = Net()
        reference.load_state_dict(model.state_dict())
        (sum(loss(reference, other, 1) for other in range(n)) / n).backward()
        loss(model, rank, 1).backward()
        factor = 1.5 if isinstance(algorithm, Reified) else 1.0
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, factor * other.grad, rtol=1e-4, atol=1e-6)
