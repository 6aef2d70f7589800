"""Process groups and their communicators: who is in them, and that members agree whatever the others do."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import bagua.torch_api as bagua
from bagua.base.errors import BaguaError
from bagua.torch_api.comm.groups import _get_default_group
from bagua.torch_api.communication import new_group


def total(comm: Any) -> float:
    """Sum of the global ranks of a communicator's members, by the communicator itself."""
    tensor = torch.tensor([float(bagua.get_rank())])
    bagua.allreduce_inplace(tensor, comm=comm)
    return tensor.item()


def rank_groups() -> None:
    bagua.init_process_group()
    me = bagua.get_rank()
    default = _get_default_group()
    assert default.ranks == [0, 1, 2, 3] and default.hosts == ((0, 1), (2, 3))
    assert default.get_global_communicator().id == 0 and _get_default_group() is default
    assert total(default.get_global_communicator()) == 6
    assert total(default.get_intra_node_communicator()) == (1 if me < 2 else 5)
    leaders = default.get_inter_node_communicator()
    assert bool(leaders) == (me in (0, 2)) and leaders.nranks() == (2 if me in (0, 2) else 0)
    if leaders:
        assert total(leaders) == 2
    if me in (1, 2):
        for _ in range(me):  # others' groups don't disturb: rank 0 has not made any of these
            new_group([me])
        pair = default.communicator([2, 1])
        assert pair is default.communicator((1, 2)) and pair.ranks == (1, 2) and pair.rank() == me - 1
        assert total(pair) == 3
        assert total(new_group([2, 1]).get_global_communicator()) == 3
    everyone = new_group()
    assert everyone.get_global_communicator().id != 0 and total(everyone.get_global_communicator()) == 6
    assert total(everyone.new_communicator()) == 6
    if me == 3:
        with pytest.raises(ValueError, match="not a rank of this job"):
            new_group([0, 4])
        with pytest.raises(ValueError, match="once"):
            new_group([1, 1])
        with pytest.raises(ValueError, match="not among the members"):
            default.communicator([0, 1])
    bagua.barrier()


def test_groups(ranks: Any) -> None:
    ranks.run(rank_groups, hosts=[[0, 1], [2, 3]])


def rank_disagrees() -> str:
    """Ranks 0 and 1 call {0, 1} the group, rank 2 says {1, 2}: it asks rank 1 for what that will never give."""
    bagua.init_process_group()
    mine = new_group([1, 2] if bagua.get_rank() == 2 else [0, 1])
    bagua.barrier()
    if bagua.get_rank() < 2:
        assert total(mine.get_global_communicator()) == 1
        return ""
    with pytest.raises(BaguaError) as failed:
        total(mine.get_global_communicator())
    return str(failed.value)


def test_groups_that_ranks_of_a_host_see_differently(ranks: Any) -> None:
    """The one that is alone with its view hears of it when the other one ends."""
    text = ranks.run(rank_disagrees, hosts=[[0, 1, 2]])[2]
    assert "rank 1" in text


def test_groups_that_hosts_see_differently(ranks: Any) -> None:
    """A wait names its ranks in ``bagua job show``, and in the rank's own output after half a minute."""
    started = ranks.start(rank_disagrees, hosts=[[0, 1], [2]])
    for rank in started[:2]:
        rank.process.wait(60.0)
        assert rank.result() == ""
    deadline, waits = time.monotonic() + 60.0, ""
    while "all ranks of this host have submitted it" not in waits:
        assert time.monotonic() < deadline and started[2].process.poll() is None, started[2].output
        time.sleep(0.05)  # nothing tells that an operation was submitted
        waits = ranks.hosts[1].engine.waiting(0.0)
    assert "host 0 (ranks 0, 1) has not begun it" in waits
