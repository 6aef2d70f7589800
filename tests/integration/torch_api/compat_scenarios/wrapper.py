"""DistributedDataParallel in torch's signature."""

import copy

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.data_parallel import (
    BaguaDistributedDataParallel,
    DistributedDataParallel,
    DistributedDataParallel_V1_9_0,
    to_bagua_process_group,
)
from compat_scenarios.support import Net, loss, net, scenario


def check_gradients(model, reference, ranks):
    """Those of a step are the means of these ranks' ones."""
    loss(model, bagua.get_rank(), 0).backward()
    (sum(loss(reference, rank, 0) for rank in ranks) / len(ranks)).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@scenario
def wrapped_in_a_module():
    """habits trains it."""
    rank = bagua.get_rank()
    model = DistributedDataParallel(net(rank), bucket_cap_mb=0.0001)
    assert isinstance(model, DistributedDataParallel_V1_9_0)
    assert type(model).__module__ == "bagua.torch_api.data_parallel.distributed"
    assert isinstance(model.inner, BaguaDistributedDataParallel) and isinstance(model.module, Net)
    check_gradients(model, net(), range(bagua.get_world_size()))
    assert len(model.bagua_buckets) == 5  # bucket_cap_mb counts, whatever the environment says
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


@scenario
def groups():
    rank, n = bagua.get_rank(), bagua.get_world_size()
    assert to_bagua_process_group().ranks == list(range(n))
    alone = bagua.communication.new_group([rank])
    assert to_bagua_process_group(alone) is alone
    with pytest.raises(ValueError, match="group"):
        to_bagua_process_group("everybody")
    check_gradients(DistributedDataParallel(net(), process_group=alone), net(), [rank])


@scenario
def what_can_not_be_honoured_is_refused():
    model = net()
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
