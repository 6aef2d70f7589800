"""Asynchronous averages in elastic jobs: a change of members holds up nobody, wherever each of them is."""

import time
from pathlib import Path

import pytest
import test_torch_async as training
import torch
from rig.files import await_file
from rig.ranks.faults import kill_self, start_beside

import bagua.torch_api as bagua
from bagua.torch_api.job.connection import Regrouped
from bagua.torch_api.job.session import current
from bagua.torch_api.train.model_renewal import ModelRenewal


class Trainer(training.Trainer):
    def step(self):
        bagua.wait_to_join()
        super().step()


def rank_one_waits(folder, becomes, gone=-1, **options):
    """Member 1 waits in a barrier while the members become ``becomes`` many; the others train meanwhile. ``gone`` is
    killed then. After the barrier all get another average; but not in pairs of an odd number, where one that has rested
    may leave before another one has met it. In the end all agree on the number of a group that they make. Returns the
    world's size."""
    bagua.init_process_group()
    member, file = current().membership.member, Path(folder, "waits")
    if bagua.is_newcomer():
        await_file(file)
    trainer = Trainer(**options)
    for _ in range(5):
        trainer.step()
    if member == 1:
        file.touch()
    elif member == gone:
        await_file(file)
        kill_self()
    else:
        while bagua.get_world_size() != becomes:
            trainer.step()
        for _ in range(20):
            trainer.step()
    bagua.barrier()
    before = trainer.algorithm.rounds
    rest = options.get("peer_selection_mode") == "shift_one" and becomes % 2
    for _ in range(20) if rest else iter(lambda: trainer.algorithm.rounds > before, True):
        trainer.step()
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())
    count = torch.ones(1)
    bagua.allreduce_inplace(count, comm=bagua.communication.new_group().get_global_communicator())
    assert count.item() == becomes
    return bagua.get_world_size()


MODES = [
    {},
    {"warmup_steps": 3},
    pytest.param({"peer_selection_mode": "shift_one"}, marks=pytest.mark.full),
    pytest.param({"codec": "int4", "everywhere": True}, marks=pytest.mark.full),
    {"peer_selection_mode": "shift_one", "codec": "minmax8", "everywhere": True},
]


@pytest.mark.parametrize("options", MODES, ids=str)
def test_one_is_lost_while_another_waits(ranks, tmp_path, options):
    arguments = {"folder": str(tmp_path), "becomes": 3, "gone": 2, **options}
    assert ranks.survive(rank_one_waits, (2,), hosts=[[0, 1], [2, 3]], **arguments) == [3] * 3


@pytest.mark.parametrize("options", MODES, ids=str)
def test_one_joins_while_another_waits(ranks, tmp_path, options):
    arguments = {"folder": str(tmp_path), "becomes": 4, **options}
    ranks.start(rank_one_waits, hosts=[[0], [1]], elastic=True, **arguments)
    ranks.join(rank_one_waits, [2, 3], 1, **arguments)
    assert ranks.left() == [4] * 4


def rank_aborts():
    """Member 2 is killed, and the others end their training. Returns the largest distance from rank 0's weights."""
    bagua.init_process_group()
    trainer = Trainer()
    for _ in range(5 + 5 * bagua.get_rank()):
        trainer.step()
    if current().membership.member == 2:
        kill_self()
    trainer.algorithm.abort()
    return trainer.differs()


def test_one_is_lost_while_others_end_their_averages(ranks):
    assert ranks.survive(rank_aborts, (2,), hosts=[[0, 1], [2, 3]]) == [0] * 3


def rank_is_late():
    """Member 2 is killed at the end of the wrap, when 0 has come to it, and 1 has not."""
    bagua.init_process_group()
    member, begin = current().membership.member, ModelRenewal.begin

    def late(self):
        if member == 2:
            time.sleep(0.3)  # 0 comes to the end of the wrap meanwhile; where it does not, nothing is seen
            kill_self()
        if member == 1 and current().connection.settled == 1:
            while not current().connection.generation_is_over():
                time.sleep(0.001)
            raise Regrouped("The last operation before was cut off.")
        begin(self)

    ModelRenewal.begin = late
    trainer = Trainer()
    trainer.steps(5)
    trainer.algorithm.abort()
    return trainer.differs()


def test_one_is_lost_at_the_end_of_the_wrap(ranks):
    """No rank begins anew by itself while others still wrap the model."""
    assert ranks.survive(rank_is_late, (2,), 3) == [0] * 2


def rank_beside():
    """Trains, and another thread communicates. It is the first to hear that member 2 is lost, or the last."""
    bagua.init_process_group()
    member, trainer = current().membership.member, Trainer()
    beside = start_beside()
    for step in range(20):
        trainer.step()
        if member == 2 and step == 10:
            kill_self()
        time.sleep(0.01)
    beside.join()
    for _ in range(5):
        trainer.step()
    bagua.barrier()
    return bagua.get_world_size()


def test_the_thread_that_trains_begins_anew(ranks):
    """Whichever thread hears of a loss first: models begin anew in their own."""
    assert ranks.survive(rank_beside, (2,), 3) == [2, 2]
