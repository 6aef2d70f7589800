"""Groups that programs make over lists of backends, and what torch finds out about them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

LISTS = {
    "bagua": "custom",
    "cpu:bagua": "custom",
    "cpu:bagua,cuda:gloo": "custom",
    "cpu:gloo": "gloo",
    "cpu:gloo,cuda:gloo": "gloo",
    "cpu:gloo,cuda:bagua": "gloo",
}
"""Default backend by list. torch warns at the end of a group that has none, and asks it for nothing."""


def rank_default_backends():
    found = {}
    for backends in LISTS:
        group = dist.new_group(backend=backends)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 2
        found[backends] = group.name()
        assert not group._has_hooks()
        dist.destroy_process_group(group)
    return found


def test_each_list_of_backends_has_a_default(pools):
    assert pools([0, 1]).run(rank_default_backends) == [LISTS, LISTS]


def rank_gathers_shards(backend):
    group = dist.new_group(backend=backend)
    specification = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    sharded = sharded_tensor.ones(specification, 4, 2, process_group=group)
    whole = torch.zeros(4, 2) if dist.get_rank() == 0 else None
    sharded.gather(0, whole)
    return None if whole is None else whole.sum().item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU torch asks for a tensor on it")
@pytest.mark.parametrize("backend", ["bagua", "cpu:bagua"])
def test_shards_are_gathered_where_there_is_no_gpu(pools, backend):
    assert pools([0, 1]).run(rank_gathers_shards, backend=backend) == [8.0, None]
