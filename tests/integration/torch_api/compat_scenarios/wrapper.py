"""DistributedDataParallel in torch's signature."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.algorithms.decentralized import DecentralizedAlgorithm, DecentralizedAlgorithmImpl
from bagua.torch_api.data_parallel import (
    BaguaDistributedDataParallel,
    DistributedDataParallel,
    DistributedDataParallel_V1_9_0,
    to_bagua_process_group,
)
from compat_scenarios.support import Net, batch, check_equal, loss, scenario, seeded


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def everyone_loss(model: nn.Module, step: int) -> torch.Tensor:
    return sum(loss(model, rank, step) for rank in range(bagua.get_world_size())) / bagua.get_world_size()


@scenario
def wrapped_in_a_module() -> None:
    rank = bagua.get_rank()
    model = DistributedDataParallel(seeded(seed=rank), bucket_cap_mb=0.0001)
    assert isinstance(model, DistributedDataParallel_V1_9_0)
    assert type(model).__module__ == "bagua.torch_api.data_parallel.distributed"
    assert isinstance(model.inner, BaguaDistributedDataParallel) and isinstance(model.module, Net)
    reference = seeded()
    optimizers = sgd(model), sgd(reference)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss(model, rank, step).backward()
        everyone_loss(reference, step).backward()
        for optimizer in optimizers:
            optimizer.step()
    check_equal(model.module, reference)
    assert len(model.bagua_buckets) == 5  # bucket_cap_mb counts, whatever the environment says
    assert model.bagua_optimizers == [] and model.bagua_algorithm is model.inner.bagua_algorithm
    assert model.require_backward_grad_sync and model.parameters_to_ignore == frozenset()
    names = {name for name, _ in model.module.named_parameters()}
    assert model.inner.params_in_use == names == model.inner.autograd_graph_params.keys()
    assert next(iter(model.state_dict())) == "module.scale"

    again = copy.deepcopy(model)
    assert again.inner is None and model.inner is not None
    with again.no_sync():
        loss(again, rank, 9).backward()  # an ordinary module: waits for nobody
    model.module.with_bagua([], None)  # wrapping what is inside takes over
    assert model.module.bagua_ddp is not model.inner
    loss(model, rank, 9).backward()


class MeetsAll(DecentralizedAlgorithmImpl):
    """A subclass as programs for the original write them."""

    def init_post_backward_hook(self, bagua_ddp: BaguaDistributedDataParallel) -> Callable[[], None]:
        return super().init_post_backward_hook(bagua_ddp=bagua_ddp)


class MeetsAllAlgorithm(DecentralizedAlgorithm):
    def reify(self, process_group: bagua.communication.BaguaProcessGroup) -> MeetsAll:
        return MeetsAll(
            process_group,
            hierarchical=self.hierarchical,
            peer_selection_mode=self.peer_selection_mode,
            communication_interval=self.communication_interval,
        )


@scenario
def made_as_lightnings_strategy_does() -> None:
    rank, reference = bagua.get_rank(), seeded()
    module = seeded(seed=rank)
    optimizers = sgd(module), sgd(reference)
    model = DistributedDataParallel_V1_9_0(
        module=module,
        optimizers=[optimizers[0]],
        algorithm=MeetsAllAlgorithm(hierarchical=False),
        gradient_as_bucket_view=True,
    )
    assert isinstance(model.bagua_algorithm, MeetsAll) and model.bagua_optimizers == [optimizers[0]]
    loss(model, rank, 0).backward()
    loss(reference, rank, 0).backward()
    for optimizer in optimizers:
        optimizer.step()
    check_equal(model.module, reference)  # all began as rank 0, so that their mean is that


@scenario
def accumulation_without_synchronisation() -> None:
    rank = bagua.get_rank()
    model, reference = DistributedDataParallel(seeded()), seeded()
    optimizers = sgd(model), sgd(reference)
    for step in range(0, 6, 3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with model.no_sync():
            assert not model.require_backward_grad_sync
            for micro in (0, 1):
                loss(model, rank, step + micro).backward()
        loss(model, rank, step + 2).backward()
        for micro in range(3):
            everyone_loss(reference, step + micro).backward()
        for optimizer in optimizers:
            optimizer.step()
    check_equal(model.module, reference)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(10, 10) for _ in range(4))

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return self.branches[used](x)


@scenario
def parameters_without_a_gradient() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    model = DistributedDataParallel(seeded(Branches), find_unused_parameters=True)
    assert (model.dim, model.broadcast_buffers, model.find_unused_parameters) == (0, True, True)
    assert (model.device_type, model.is_multi_device_module, model.static_graph) == ("cpu", False, False)
    assert model.bagua_buckets[0].bagua_module_name == model.inner.bagua_module_name
    reference = seeded(Branches)
    optimizers = sgd(model), sgd(reference)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch(rank, step, 3, 10), (rank + step) % 3).square().mean().backward()
        total = sum(reference(batch(other, step, 3, 10), (other + step) % 3).square().mean() for other in range(n)) / n
        total.backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None)
        for optimizer in optimizers:
            optimizer.step()
    check_equal(model.module, reference)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


@scenario
def buffers_follow_rank_0_or_do_not() -> None:
    rank = bagua.get_rank()
    model = DistributedDataParallel(seeded(normed))
    alone = DistributedDataParallel(seeded(normed), broadcast_buffers=False)
    for step in range(3):
        for wrapped in (model, alone):
            loss(wrapped, rank, step).backward()
    # Before the last forward pass they were rank 0's; each has seen its own batch since.
    reference = seeded(normed)
    own = seeded(normed)
    for step in range(3):
        reference.train()
        reference(batch(0 if step < 2 else rank, step, 5, 10))
        own(batch(rank, step, 5, 10))
    torch.testing.assert_close(model.module[1].running_mean, reference[1].running_mean)
    torch.testing.assert_close(alone.module[1].running_mean, own[1].running_mean)
    assert model.module[1].num_batches_tracked.item() == 3


@scenario
def several_models_in_turn() -> None:
    rank = bagua.get_rank()
    first, second = DistributedDataParallel(seeded()), DistributedDataParallel(seeded(seed=5))
    references = seeded(), seeded(seed=5)
    for step in range(2):
        # One backward pass through both.
        (loss(first, rank, step) + loss(second, rank, step + 7)).backward()
        (everyone_loss(references[0], step) + everyone_loss(references[1], step + 7)).backward()
    for model, reference in zip((first, second), references, strict=True):
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


@scenario
def groups() -> None:
    rank, n = bagua.get_rank(), bagua.get_world_size()
    assert to_bagua_process_group().ranks == list(range(n))
    alone = bagua.communication.new_group([rank])
    assert to_bagua_process_group(alone) is alone
    with pytest.raises(ValueError, match="group"):
        to_bagua_process_group("everybody")
    model, reference = DistributedDataParallel(seeded(), process_group=alone), seeded()
    loss(model, rank, 0).backward()
    loss(reference, rank, 0).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@scenario
def what_can_not_be_honoured_is_refused() -> None:
    model = seeded()
    for options, words in (
        ({"device_ids": [0]}, "device_ids"),
        ({"output_device": 0}, "output_device"),
        ({"dim": 1}, "dim"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb"),
        ({"process_group": 5}, "group"),
    ):
        with pytest.raises(ValueError, match=words):
            DistributedDataParallel(model, **options)
    with pytest.raises(ValueError, match="no trainable parameter"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    wrapped = DistributedDataParallel(model, check_reduction=True)
    for name in ("scatter", "gather", "register_comm_hook", "will_sync_module_buffers"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(wrapped, name)()
    if bagua.get_world_size() > 1:
        with pytest.raises(BaguaError, match="differ"):
            DistributedDataParallel(nn.Linear(10, 2 + bagua.get_rank()))
