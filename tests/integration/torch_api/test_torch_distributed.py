"""torch.distributed beside us: its default group, groups of its kind as ours, gradients through an all-reduce."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rig.files import await_file
from rig.ranks.faults import kill_self

import bagua.torch_api as bagua
from bagua.chaos.firewall import Firewall, reason_against
from bagua.torch_api.algorithms.gradient_allreduce import GradientAllReduceAlgorithm
from bagua.torch_api.communication import _torch_to_bagua_pg_map, from_torch_group
from bagua.torch_api.data_parallel.functional import all_reduce
from bagua.torch_api.job.session import current
from bagua.torch_api.job.torch_distributed import _backends_of_all, connects_lazily


def check_groups_of_torch():
    me = bagua.get_rank()
    ours = from_torch_group(None)
    assert ours.ranks == [0, 1, 2] and ours is from_torch_group(dist.group.WORLD) and ours is dist.group.WORLD.bagua_pg
    pair = dist.new_group([0, 2])
    if me == 1:
        with pytest.raises(ValueError, match="of which this process is a member"):
            from_torch_group(pair)
    else:
        assert pair.bagua_patch() is pair and pair.bagua_pg.ranks == [0, 2]
        tensor = torch.tensor([me + 1.0])
        bagua.allreduce_inplace(tensor, comm=pair.bagua_get_global_communicator())
        assert tensor.item() == 4
        assert pair.bagua_get_intra_node_communicator().ranks == (me,)
        assert pair.bagua_get_inter_node_communicator().ranks == (0, 2)
        assert len(_torch_to_bagua_pg_map) == 2
        dist.destroy_process_group(pair)
    del pair
    gc.collect()
    assert len(_torch_to_bagua_pg_map) == 1


def rank_beside_torch():
    assert not dist.is_initialized()
    bagua.init_process_group()
    assert dist.is_initialized() and dist.get_backend() == "gloo" and dist.get_rank() == bagua.get_rank()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [3, 3]
    check_groups_of_torch()
    x = torch.tensor([float(bagua.get_rank()), 5.0], requires_grad=True)
    all_reduce(x, dist.ReduceOp(dist.ReduceOp.MAX), dist.group.WORLD).sum().backward()
    assert x.grad.tolist() == [3.0 * (bagua.get_rank() == 2), 1]
    pid = os.fork()
    if pid == 0:
        raise SystemExit(0)  # frees what Python holds, without the threads of the parent
    assert os.waitpid(pid, 0)[1] == 0
    bagua.barrier()
    bagua.destroy_process_group()
    assert not dist.is_initialized() and "GLOO_SOCKET_IFNAME" not in os.environ


def test_torch_distributed(ranks):
    ranks.run(rank_beside_torch, hosts=[[0, 1], [2]])


def rank_alone_or_not():
    """Rank 1 wants none, rank 2 has made one of its own: nobody waits for them, and what is the user's stays."""
    me = bagua.get_rank()
    if me == 1:
        os.environ["BAGUA_TORCH_DISTRIBUTED"] = "0"
    if me == 2:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    bagua.init_process_group()
    # Before torch 2.8 all ranks connect at once: all have it, or none of ours.
    assert dist.is_initialized() == (me != 1 if connects_lazily() else me == 2)
    bagua.barrier()
    bagua.destroy_process_group()
    assert dist.is_initialized() == (me == 2)


def test_nobody_waits_for_ranks_that_have_none(ranks):
    ranks.run(rank_alone_or_not, 3)


def rank_ends_within_an_operation(folder):
    """A thread of torch's frees the tensor of rank 0, which has left nothing else that holds it."""
    bagua.init_process_group()
    dist.barrier()
    begun = Path(folder, "begun")
    if bagua.get_rank() == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
        begun.touch()
    else:
        await_file(begun)
        dist.all_reduce(torch.ones(4))
    assert _backends_of_all(), "torch has moved what is private to it"
    bagua.destroy_process_group()


def test_the_end_waits_for_an_operation_of_the_programs_own(ranks, tmp_path):
    ranks.run(rank_ends_within_an_operation, 2, folder=str(tmp_path))


def rank_fails_with_torch():
    bagua.init_process_group()
    dist.barrier()
    if bagua.get_rank() == 1:
        raise ArithmeticError("on purpose")
    bagua.barrier()


def test_a_rank_that_fails_ends_at_once_with_torch_distributed_up(ranks):
    started = ranks.start(rank_fails_with_torch, 2)
    ranks.wait(60)
    assert "on purpose" in started[1].output and "rank 1" in started[0].output
    assert [one.process.returncode for one in started] == [1, 1]


def total(member):
    """The sum of what all ranks have."""
    tensor = torch.full((1000,), 2.0**member)
    dist.all_reduce(tensor)
    return tensor[0].item()


def rank_loses_others():
    """Member 0 is lost while others use Bagua, 1 while they are in an all-reduce of torch's. Returns what it saw."""
    bagua.init_process_group()
    member = current().membership.member
    seen = [total(member)]

    @bagua.communication.on_membership_change
    def note(change):
        seen.append((dist.get_rank(), dist.get_world_size(), change.world_size))

    if member == 0:
        kill_self()
    bagua.barrier()
    seen.append(total(member))
    if member == 1:
        kill_self()
    with pytest.raises(RuntimeError, match="onnection"):  # some are not connected to the one that died
        for _ in range(3):
            total(member)
    bagua.barrier()
    seen.append(total(member))
    pair = dist.new_group([0, 1])
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=pair)
    seen.append(tensor.item())
    return seen


@pytest.mark.skipif(not connects_lazily(), reason="before torch 2.8 it does not come up again")
def test_it_comes_up_again_without_lost_ranks(ranks):
    for place, seen in enumerate(ranks.survive(rank_loses_others, (0, 1), hosts=[[0, 1], [2, 3]])):
        assert seen == [15, (place + 1, 3, 3), 14, (place, 2, 2), 12, 2]


def rank_meets_newcomers(folder):
    """Goes on until three are together. Returns what it saw."""
    bagua.init_process_group()
    member = current().membership.member
    seen = [total(member)]
    bagua.communication.on_membership_change(lambda _: seen.append(dist.get_world_size()))
    model = torch.nn.Linear(2, 2)
    model.with_bagua([torch.optim.SGD(model.parameters(), lr=0.1)], GradientAllReduceAlgorithm())
    if bagua.is_newcomer():
        await_file(Path(folder, "step"))
    while True:
        bagua.wait_to_join()
        model(torch.ones(1, 2)).sum().backward()
        Path(folder, "step").touch()
        if bagua.get_world_size() == 3:
            return [*seen, total(member)]


@pytest.mark.skipif(not connects_lazily(), reason="before torch 2.8 it does not come up again")
def test_it_comes_up_again_with_newcomers(ranks, tmp_path):
    ranks.start(rank_meets_newcomers, 2, elastic=True, folder=str(tmp_path))
    ranks.join(rank_meets_newcomers, [2], 1, folder=str(tmp_path))
    assert ranks.left() == [[3, 3, 7], [3, 3, 7], [4, 3, 7]]


def rank_loses_its_meeting_place(folder):
    os.environ["BAGUA_MEETING_DIR"] = folder
    bagua.init_process_group()
    seen = [total(bagua.get_rank())]
    bagua.barrier()
    if bagua.get_rank() == 0:
        for file in Path(folder).iterdir():  # root may write what is read-only, but no folder
            file.unlink()
            file.mkdir()
    bagua.barrier()
    bagua.destroy_process_group()
    return seen


def test_ranks_end_where_their_meeting_place_can_not_be_written_any_more(ranks, tmp_path):
    """As on a disk that has become read-only: torch's store can't be taken down."""
    folder = tmp_path / "meeting"
    folder.mkdir()
    assert ranks.run(rank_loses_its_meeting_place, 2, folder=str(folder)) == [[3], [3]]


def test_a_host_that_drops_its_own_packets_opens_no_store_for_long():
    if reason := reason_against():
        pytest.skip(f"no firewall here: {reason}")
    firewall = Firewall("store", "127.0.0.8", 1)
    try:
        listen = "from bagua.torch_api.job.torch_distributed import _listen; _listen('127.0.0.7', 2)"
        with firewall.dropped(("in", "out")):
            command = [*firewall.prefix, sys.executable, "-P", "-c", listen]
            ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    finally:
        firewall.close()
    assert "DistNetworkError" in ended.stderr, ended.stderr
