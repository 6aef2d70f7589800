"""Asynchronous model average on real ranks: in training nobody waits for anybody; after ``abort`` all are the same."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.base.errors import CommunicationError
from bagua.torch_api.algorithms.async_model_average import AsyncModelAverageAlgorithm

SEQUENCES = 40
LIVENESS_EVERY = 10
TWO_HOSTS = [[0, 1], [2, 3]]


class Trainer:
    """A small model and its optimizer under asynchronous average."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.wrap(**options)

    def wrap(self, **options: Any) -> None:
        self.model.with_bagua([self.optimizer], AsyncModelAverageAlgorithm(**{"sync_interval_ms": 0, **options}))  # type: ignore[operator]

    @property
    def algorithm(self) -> Any:
        return self.model.bagua_algorithm

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def average_once_more(self) -> None:
        """Trains until a new average has come; all ranks do it, and all must have resumed."""
        rounds = torch.tensor([self.algorithm.rounds])
        bagua.allreduce_inplace(rounds, bagua.ReduceOp.MAX)
        while self.algorithm.rounds <= rounds.item():
            self.step()
        assert all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def differs(self) -> float:
        """The largest distance of a weight from rank 0's."""
        mine = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        first = mine.clone()
        bagua.broadcast(first)
        return (mine - first).abs().max().item()


def rank_random_sequences(options: dict[str, Any]) -> int:
    """All ranks abort and resume in the same order, and each takes as many steps in between as its own dice say."""
    bagua.init_process_group()
    trainer = Trainer(**options)
    trainer.steps(4)  # the warm-up, in which ranks are in step
    common, own = random.Random(0), random.Random(bagua.get_rank())
    for number in range(SEQUENCES):
        trainer.steps(own.randrange(8))
        what, argument = common.choice(("abort", "resume")), common.choice((trainer.model, None))
        getattr(trainer.algorithm, what)(argument)
        if what == "abort" and number % LIVENESS_EVERY == LIVENESS_EVERY - 1:
            trainer.algorithm.resume()
            trainer.average_once_more()
            trainer.algorithm.abort()
            assert trainer.differs() == 0
    return trainer.algorithm.rounds


@pytest.mark.parametrize(
    "options",
    [{}, {"peer_selection_mode": "shift_one"}, {"codec": "int4", "everywhere": True, "warmup_steps": 3}],
    ids=["all", "pairs", "codec"],
)
def test_abort_leaves_the_same_weights_on_all_ranks(ranks: Any, options: dict[str, Any]) -> None:
    assert min(ranks.run(rank_random_sequences, hosts=TWO_HOSTS, options=options)) > 0


def rank_aborts_early() -> float:
    """Rank 0 has no more batches, and the others go on until they have had more averages with it."""
    bagua.init_process_group()
    trainer = Trainer()
    trainer.average_once_more()
    more = trainer.algorithm.rounds + 5
    while bagua.get_rank() and trainer.algorithm.rounds < more:
        trainer.step()
    trainer.algorithm.abort(trainer.model)
    return trainer.differs()


def test_a_rank_that_aborts_takes_part_until_all_have(ranks: Any) -> None:
    assert ranks.run(rank_aborts_early, hosts=TWO_HOSTS) == [0] * 4


def rank_aborts_alone() -> str:
    bagua.init_process_group()
    trainer = Trainer()
    trainer.average_once_more()
    bagua.barrier()
    if bagua.get_rank() == 1:
        bagua.destroy_process_group()
        return ""
    with pytest.raises(CommunicationError) as caught:
        trainer.algorithm.abort()
    return str(caught.value)


def test_abort_does_not_wait_for_a_rank_that_has_left(ranks: Any) -> None:
    assert "rank 1" in ranks.run(rank_aborts_alone, hosts=[[0, 1]])[0]


def rank_one_stands_still() -> None:
    bagua.init_process_group()
    trainer = Trainer()
    trainer.steps(5)
    if bagua.get_rank() != 1:
        trainer.steps(200)  # rank 1 takes none meanwhile
    bagua.barrier()
    trainer.average_once_more()


def test_a_rank_that_stands_still_holds_up_nobody(ranks: Any) -> None:
    ranks.run(rank_one_stands_still, hosts=TWO_HOSTS)


def rank_slow(factor: int) -> float:
    """Seconds for 200 steps. Rank 3 takes ``factor`` times as long per step, and as many fewer steps."""
    bagua.init_process_group()
    trainer = Trainer()
    trainer.steps(20)
    bagua.barrier()
    began = time.monotonic()
    if bagua.get_rank() == 3 and factor > 1:
        for _ in range(200 // factor):
            at = time.monotonic()
            trainer.step()
            time.sleep((factor - 1) * (time.monotonic() - at))
    else:
        trainer.steps(200)
    took = time.monotonic() - began
    bagua.barrier()
    return took


def test_a_slow_rank_does_not_slow_the_others(make_ranks: Any, tmp_path_factory: Any) -> None:
    """With every step waiting for all, 20 steps of rank 3 would take the others' 200 as long."""
    found = []
    for factor in (1, 10):
        with make_ranks(tmp_path_factory.mktemp("ranks")) as ranks:
            found.append(max(ranks.run(rank_slow, hosts=TWO_HOSTS, factor=factor)[:3]))
    assert found[1] < 4 * found[0]


def rank_ends_early(ends: int) -> int:
    bagua.init_process_group()
    trainer = Trainer()
    trainer.average_once_more()
    bagua.barrier()
    if bagua.get_rank() == ends:
        bagua.destroy_process_group()
        return trainer.algorithm.rounds
    trainer.steps(200)
    return trainer.algorithm.rounds


@pytest.mark.parametrize("hosts", [[[0, 1]], [[0], [1]], TWO_HOSTS])
def test_the_end_of_one_rank_is_no_error_of_the_others(ranks: Any, hosts: list[list[int]]) -> None:
    ranks.run(rank_ends_early, hosts=hosts, ends=1)


def rank_wraps_again() -> None:
    """With an average under way on some ranks and not on others."""
    bagua.init_process_group()
    trainer = Trainer()
    dice = random.Random(bagua.get_rank())
    for number in range(6):
        trainer.steps(dice.randrange(4))
        trainer.wrap(warmup_steps=number % 3, peer_selection_mode=("all", "shift_one")[number % 2])
        if number % 3:
            trainer.steps(3)
    trainer.average_once_more()


def test_wrapping_again_with_an_average_under_way(ranks: Any) -> None:
    ranks.run(rank_wraps_again, hosts=TWO_HOSTS)
