"""Asynchronous model average on real ranks: in training nobody waits for anybody; after ``abort`` all are the same."""

import random

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

    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.wrap(**options)

    def wrap(self, **options):
        self.model.with_bagua([self.optimizer], AsyncModelAverageAlgorithm(**{"sync_interval_ms": 0, **options}))

    @property
    def algorithm(self):
        return self.model.bagua_algorithm

    def step(self):
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 8)).square().mean().backward()
        self.optimizer.step()

    def steps(self, count):
        for _ in range(count):
            self.step()

    def close(self, found=None):
        self.model.bagua_ddp.close()
        return found

    def average_once_more(self):
        """Trains until a new average has come; all ranks do it, and all must have resumed."""
        rounds = torch.tensor([self.algorithm.rounds])
        bagua.allreduce_inplace(rounds, bagua.ReduceOp.MAX)
        while self.algorithm.rounds <= rounds.item():
            self.step()
        assert all(bool(parameter.isfinite().all()) for parameter in self.model.parameters())

    def differs(self):
        """The largest distance of a weight from rank 0's."""
        mine = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        first = mine.clone()
        bagua.broadcast(first)
        return (mine - first).abs().max().item()


def rank_random_sequences(options):
    """All ranks abort and resume in the same order, and each takes as many steps in between as its own dice say."""
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
    return trainer.close(trainer.algorithm.rounds)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"peer_selection_mode": "shift_one"}, marks=pytest.mark.full),
        {"codec": "int4", "everywhere": True, "warmup_steps": 3},
    ],
    ids=["all", "pairs", "codec"],
)
def test_abort_leaves_the_same_weights_on_all_ranks(pools, options):
    assert min(pools(*TWO_HOSTS).run(rank_random_sequences, options=options)) > 0


def rank_aborts_early():
    """Rank 0 has no more batches, and the others go on until they have had more averages with it."""
    trainer = Trainer()
    trainer.average_once_more()
    more = trainer.algorithm.rounds + 5
    while bagua.get_rank() and trainer.algorithm.rounds < more:
        trainer.step()
    trainer.algorithm.abort(trainer.model)
    return trainer.close(trainer.differs())


def test_a_rank_that_aborts_takes_part_until_all_have(pools):
    assert pools(*TWO_HOSTS).run(rank_aborts_early) == [0] * 4


def rank_aborts_alone():
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


def test_abort_does_not_wait_for_a_rank_that_has_left(ranks):
    assert "rank 1" in ranks.run(rank_aborts_alone, hosts=[[0, 1]])[0]


def rank_one_stands_still():
    trainer = Trainer()
    trainer.steps(5)
    if bagua.get_rank() != 1:
        trainer.steps(200)  # rank 1 takes none meanwhile
    bagua.barrier()
    trainer.average_once_more()
    trainer.close()


def test_a_rank_that_stands_still_holds_up_nobody(pools):
    pools(*TWO_HOSTS).run(rank_one_stands_still)


def rank_ends_early():
    bagua.init_process_group()
    trainer = Trainer()
    trainer.average_once_more()
    bagua.barrier()
    if bagua.get_rank() == 1:
        bagua.destroy_process_group()
        return
    trainer.steps(200)


def test_the_end_of_one_rank_is_no_error_of_the_others(ranks):
    ranks.run(rank_ends_early, hosts=TWO_HOSTS)


def rank_has_two_models():
    """Models of other weights, which don't learn. Each rank has another order of steps. Returns the weights."""
    bagua.init_process_group()
    models = []
    for value in (1.0, 100.0):
        model = nn.Linear(4, 4)
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        algorithm = AsyncModelAverageAlgorithm(peer_selection_mode="shift_one", sync_interval_ms=0)
        models.append((model.with_bagua([optimizer], algorithm), optimizer))
    for step in range(40):
        for model, optimizer in models[:: 1 if (bagua.get_rank() + step) % 2 else -1]:
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    for model, _ in models:
        model.bagua_algorithm.abort(model)
    return [sorted({value for one in model.parameters() for value in one.flatten().tolist()}) for model, _ in models]


def test_pairs_of_two_models_do_not_mix(ranks):
    assert ranks.run(rank_has_two_models, 4) == [[[1.0], [100.0]]] * 4
