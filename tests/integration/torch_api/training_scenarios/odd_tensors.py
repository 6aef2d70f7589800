"""Parameters and buffers whose elements do not lie densely in memory of their own."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.data_parallel import DistributedDataParallel
from training_scenarios.support import scenario, warnings_ignored


def with_buffer(buffer):
    net = nn.Linear(4, 1)
    net.register_buffer("table", buffer)
    return net


@scenario
def buffers_that_can_be_sent():
    """All become rank 0's, when the model is wrapped and before each forward pass."""
    torch.manual_seed(bagua.get_rank())
    complex_ones = torch.randn(2, 3, dtype=torch.cfloat)
    for buffer in (
        complex_ones,
        complex_ones[0].conj(),
        complex_ones[1].conj().imag,  # lazily negated
        torch.randn(1, 4).expand(3, 4),
        torch.randn(()).expand(3),
        torch.randn(6, 4)[::2],
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.empty(0),
    ):
        net, expanded = with_buffer(buffer), 0 in buffer.stride()
        model = DistributedDataParallel(net)
        check_same(numbers(net.table))
        if not expanded:
            with torch.no_grad():
                net.table.copy_(torch.full((), float(bagua.get_rank())).expand(buffer.shape))
        model(torch.ones(2, 4)).sum().backward()
        check_same(numbers(net.table))
        assert expanded or not numbers(net.table).any()


def numbers(buffer):
    return torch.view_as_real(buffer.to(torch.cfloat).resolve_conj())


def check_same(values):
    everyone = torch.zeros(bagua.get_world_size(), values.numel())
    if values.numel():
        bagua.allgather(values.contiguous().view(-1), everyone)
    assert bool((everyone == everyone[0]).all())


@scenario
def tensors_that_cannot_be_sent():
    """Each is named on all ranks, also where one rank alone has it."""
    last = bagua.get_world_size() - 1
    for words, tensor in {
        "sparse_coo": torch.eye(4).to_sparse(),
        "device meta": torch.ones(3, device="meta"),
        "no shape": nn.parameter.UninitializedBuffer(),
    }.items():
        net = with_buffer(tensor if bagua.get_rank() == last else torch.ones(3))
        with pytest.raises((TypeError, BaguaError), match=rf"Buffer table.*{words}.*\[BG60[13]\]"):
            net.with_bagua([])
        net._bagua_params_and_buffers_to_ignore = ["table"]
        net.with_bagua([])
    net.frozen = nn.Parameter(torch.ones(3, device="meta"), requires_grad=False)
    with pytest.raises(TypeError, match=r"Parameter frozen.*device meta.*\[BG601\]"):
        net.with_bagua([])


@scenario
def sharded_models():
    """Models that torch shards are refused, on all ranks."""
    if hasattr(fsdp, "fully_shard"):  # torch 2.6
        sharded = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        with warnings_ignored():
            fsdp.fully_shard(sharded)
        for wrap in (lambda: sharded.with_bagua([]), lambda: DistributedDataParallel(sharded)):
            with pytest.raises(TypeError, match=r"Parameter 0\.weight is a DTensor.*\[BG601\]"):
                wrap()

    class Flat(fsdp.FullyShardedDataParallel):  # the class itself needs an accelerator
        def __init__(self):
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = nn.Linear(4, 4)

    with pytest.raises(BaguaError, match=r"part '1'.*FullyShardedDataParallel.*\[BG615\]"):
        nn.Sequential(nn.Linear(4, 4), Flat()).with_bagua([])
