"""Operations in Python on buckets, tensors given by closures, weights averaged by a thread of the user's."""

import threading

import pytest
import torch
from training_scenarios.support import check_close_parameters

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from compat_scenarios.support import RATE, OfWeights, Reified, loss, net, scenario, start, train


class ScaledImpl(AlgorithmImpl):
    """Gradients are scaled, averaged, and scaled again."""

    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops()

        def before(name):
            assert name == bucket.name
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(3.0)

        def after(name):
            for tensor in bucket.tensors:
                assert tensor.bagua_getter_closure() is tensor.grad
                tensor.grad -= 0.5 * tensor.grad

        bucket.append_python_op(before, group=self.process_group)
        bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)
        bucket.append_python_op(after, group=self.process_group)

    def init_backward_hook(self, bagua_ddp):
        def hook(parameter_name, parameter):
            if parameter_name in self._communication_tensor_names:
                assert parameter.bagua_backend_tensor().data_ptr() == parameter.grad.data_ptr()
                parameter.bagua_mark_communication_ready()

        return hook

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: bagua_ddp._bagua_backend.wait_pending_comm_ops()


@scenario
def python_operations_around_a_centralized_one():
    """Gradients are 1.5 times those of our gradient all-reduce, which steps as much faster."""
    for options in ({}, {"do_flatten": False}):
        model, optimizer = start(Reified(ScaledImpl), **options)
        ours, other = start(Algorithm.init("gradient_allreduce"), 1.5 * RATE)
        for step in range(4):
            train(model, optimizer, step)
            train(ours, other, step)
            for parameter, wanted in zip(model.parameters(), ours.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, 1.5 * wanted.grad, rtol=1e-4, atol=1e-6)
        check_close_parameters(model, ours)


class FailingImpl(AlgorithmImpl):
    def init_operations(self, bagua_ddp, bucket):
        def fail(name):
            raise ArithmeticError(f"python operation of bucket {name}")

        bucket.append_centralized_synchronous_op()
        bucket.append_python_op(fail)


@scenario
def exceptions_of_python_operations_reach_the_user():
    model, _ = start(Reified(FailingImpl))
    with pytest.raises(ArithmeticError, match="python operation of bucket"):
        loss(model, bagua.get_rank(), 0).backward()
    model.bagua_ddp.close()


class MomentumOptimizer(torch.optim.Optimizer):
    """x -= lr m, with m = b m + (1-b) g made here for ``warmup`` steps, and elsewhere after that."""

    def __init__(self, parameters, warmup=2):
        super().__init__(parameters, {"lr": RATE, "beta": 0.9})
        self.warmup = warmup
        self.step_id = 0
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["momentum"] = torch.zeros_like(parameter.detach())

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter]["momentum"]
            if self.step_id < self.warmup:
                momentum.mul_(0.9).add_(parameter.grad, alpha=0.1)
            parameter.add_(momentum, alpha=-RATE)
        self.step_id += 1


class MomentumImpl(AlgorithmImpl):
    """Gradients are averaged for some steps, then momentum; in the manner of the original's QAdam."""

    def __init__(self, process_group, optimizer):
        super().__init__(process_group)
        self.optimizer = optimizer
        self.resets = 0

    @property
    def warming_up(self):
        return self.optimizer.step_id < self.optimizer.warmup

    def need_reset(self):
        return self.optimizer.step_id == self.optimizer.warmup

    def init_tensors(self, bagua_ddp):
        self.resets += 1
        states = self.optimizer.state
        if self.warming_up:
            closures = {
                "getter_closure": lambda one: one.grad,
                "setter_closure": lambda one, tensor: setattr(one, "grad", tensor),
            }
        else:
            closures = {
                "getter_closure": lambda one: states[one]["momentum"],
                "setter_closure": lambda one, tensor: states[one].update(momentum=tensor),
            }
        tensors = [
            parameter.bagua_ensure_grad().ensure_bagua_tensor(name, bagua_ddp.bagua_module_name, **closures)
            for name, parameter in reversed(bagua_ddp.bagua_build_params())
        ]
        self._communication_tensor_names = {tensor.bagua_tensor_name for tensor in tensors}
        return tensors

    def tensors_to_buckets(self, tensors, do_flatten):
        alignment = self.process_group.get_global_communicator().nranks()
        return [
            BaguaBucket(bucket, flatten=do_flatten, name=str(index), alignment=alignment)
            for index, bucket in enumerate(tensors)
        ]

    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops()
        if self.warming_up:
            bucket.append_centralized_synchronous_op(hierarchical=False, average=True, group=self.process_group)
            return

        def momentum(name):
            for tensor in bucket.tensors:
                tensor.bagua_getter_closure().mul_(0.9).add_(tensor.grad, alpha=0.1)

        bucket.append_python_op(momentum, group=self.process_group)
        bucket.append_centralized_synchronous_op(average=True, scattergather=True, group=self.process_group)

    def init_backward_hook(self, bagua_ddp):
        return lambda parameter_name, parameter: parameter.bagua_mark_communication_ready()

    def init_post_backward_hook(self, bagua_ddp):
        return bagua_ddp._bagua_backend.wait_pending_comm_ops


@scenario
def momentum_as_effective_tensor():
    n = bagua.get_world_size()
    for options in ({}, {"do_flatten": False}):
        model, reference = net(bagua.get_rank()), net()
        mine, other = MomentumOptimizer(model.parameters()), MomentumOptimizer(reference.parameters(), warmup=100)
        model.with_bagua([mine], Reified(MomentumImpl, mine), **options)
        for step in range(6):
            other.zero_grad()
            (sum(loss(reference, rank, step) for rank in range(n)) / n).backward()
            other.step()
            train(model, mine, step)
        check_close_parameters(model, reference, 1e-5, 1e-5)
        assert model.bagua_algorithm.resets == 2
        for bucket in model.bagua_buckets:
            assert isinstance(bucket, BaguaBucket) and (options or bucket.check_flatten())
            assert sum(map(torch.Tensor.numel, bucket.tensors)) % n == 0 or bucket.padding_tensor is not None


class BackgroundImpl(OfWeights):
    """Gradients stay this rank's own; weights are averaged in a thread."""

    def init_operations(self, bagua_ddp, bucket):
        bucket.clear_ops()
        bucket._async_op = bucket.append_asynchronous_model_average_op("all", group=self.process_group)

    def init_forward_pre_hook(self, bagua_ddp):
        return lambda input: [bucket._async_op.lock_weight() for bucket in bagua_ddp.bagua_buckets]

    def init_post_backward_hook(self, bagua_ddp):
        return lambda: [bucket._async_op.unlock_weight() for bucket in bagua_ddp.bagua_buckets]


@scenario
def weights_averaged_in_a_thread():
    model, optimizer = start(Reified(BackgroundImpl))
    (bucket,) = model.bagua_buckets
    rounds = 0

    def average():
        for tensor in bucket.tensors:
            tensor.bagua_mark_communication_ready_without_synchronization()
        bagua.get_backend(model.bagua_module_name).wait_pending_comm_ops()

    def loop():
        nonlocal rounds
        while bucket._async_op.get_status():
            average()
            rounds += 1

    worker = threading.Thread(target=loop)
    worker.start()
    for step in range(100):  # autograd complains if the thread writes weights that are locked
        train(model, optimizer, step)
    bucket._async_op.abort()
    worker.join()
    assert rounds >= 1 and not bucket._async_op.get_status()
    # Alone, all ranks now average what they have: after one more round they agree.
    bagua.barrier()
    bucket._async_op.reset()
    average()
    mine = bucket.flattened_tensor()
    everyone = torch.zeros(bagua.get_world_size(), mine.numel())
    bagua.allgather(mine, everyone)
    torch.testing.assert_close(everyone, everyone[:1].expand_as(everyone), rtol=1e-5, atol=1e-6)
