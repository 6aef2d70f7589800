"""Operations in Python on buckets, around a centralised one; equal to a simulation in one process."""

from __future__ import annotations

from typing import Any

import torch

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from compat_scenarios.own_algorithm import RATE, Reified, start
from compat_scenarios.support import (
    check_equal,
    gradients,
    loss,
    mean,
    replicas,
    scenario,
)


class ScaledImpl(AlgorithmImpl):
    """Gradients are scaled, averaged, and scaled again."""

    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        bucket.clear_ops()

        def before(name: str) -> None:
            assert name == bucket.name
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(3.0)

        def after(name: str) -> None:
            for tensor in bucket.tensors:
                assert tensor.bagua_getter_closure() is tensor.grad
                tensor.grad -= 0.5 * tensor.grad

        bucket.append_python_op(before, group=self.process_group)
        bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)
        bucket.append_python_op(after, group=self.process_group)

    def init_backward_hook(self, bagua_ddp: Any) -> Any:
        def hook(parameter_name: str, parameter: torch.nn.Parameter) -> None:
            if parameter_name in self._communication_tensor_names:
                assert parameter.bagua_backend_tensor().data_ptr() == parameter.grad.data_ptr()
                parameter.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp: Any) -> Any:
        def hook() -> None:
            bagua_ddp._bagua_backend.wait_pending_comm_ops()

        return hook


@scenario
def python_operations_around_a_centralized_one() -> None:
    for options in ({}, {"do_flatten": False}):
        model, optimizer = start(Reified(ScaledImpl), **options)
        simulated = replicas()
        for step in range(4):
            average = mean(gradients(simulated, step))
            optimizer.zero_grad()
            loss(model, bagua.get_rank(), step).backward()
            for parameter, wanted in zip(model.parameters(), average, strict=True):
                torch.testing.assert_close(parameter.grad, 1.5 * wanted, rtol=1e-4, atol=1e-6)
            optimizer.step()
            for other in simulated:
                with torch.no_grad():
                    for parameter, wanted in zip(other.parameters(), average, strict=True):
                        parameter -= RATE * 1.5 * wanted
        check_equal(model, simulated[0])


class FailingImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp: Any, bucket: BaguaBucket) -> None:
        def fail(name: str) -> None:
            raise ArithmeticError(f"python operation of bucket {name}")

        bucket.append_centralized_synchronous_op()
        bucket.append_python_op(fail)


@scenario
def exceptions_of_python_operations_reach_the_user() -> None:
    model, _ = start(Reified(FailingImpl))
    try:
        loss(model, bagua.get_rank(), 0).backward()
    except ArithmeticError as error:
        assert "python operation of bucket" in str(error)
    else:
        raise AssertionError("the exception was lost")
    model.bagua_ddp.close()
