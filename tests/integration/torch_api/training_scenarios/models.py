"""Kinds of models, and parameters and buffers whose elements do not lie densely in memory of their own."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.data_parallel import DistributedDataParallel
from training_scenarios.support import batch, compare, mlp, scenario, warnings_ignored, wide_mlp, wide_square, wrap


@scenario
def plain():
    def clip(model):
        return nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    compare(wide_mlp, wide_square, steps=50, tolerance=1e-9)
    compare(mlp, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    for options in ({}, {"do_flatten": False}, {"average": False}, {"between": clip}):
        compare(mlp, set_to_none=False, **options)
    compare(lambda: nn.Linear(10, 3), average=False)  # parameters of the root
    nothing = nn.Tanh()
    wrap(nothing)
    nothing(batch(0, 0, 3).requires_grad_()).sum().backward()


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
def sharded_models():
    """Models that torch shards are refused, on all ranks."""
    if hasattr(fsdp, "fully_shard"):  # torch 2.6
        sharded = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        with warnings_ignored():
            fsdp.fully_shard(sharded)
        for wrap in (lambda: sharded.with_bagua([]), lambda: DistributedDataParallel(sharded)):
            with pytest.raises(BaguaError, match=r"no islands.*\[BG618\]"):
                wrap()

    class Flat(fsdp.FullyShardedDataParallel):  # the class itself needs an accelerator
        def __init__(self):
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = nn.Linear(4, 4)

    with pytest.raises(BaguaError, match=r"part '1'.*FullyShardedDataParallel.*\[BG615\]"):
        nn.Sequential(nn.Linear(4, 4), Flat()).with_bagua([])
