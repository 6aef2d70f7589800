"""Jobs that tune themselves: results stay the same, and members that are lost or join do not break a step."""

import asyncio
import functools
import threading
from contextlib import contextmanager

import pytest
import torch
from rig.ranks.faults import kill_self
from rig.ranks.recutting import Alternating
from training_scenarios.support import check_identical, mlp, seeded, sgd, square, wrap

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.daemon.coordinator.store.store import Store
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.use.tuning import Tuning
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.job.session import current

MOST_STEPS, LEAST_TRIALS = 3_000, 1
TUNE = {"bucket_kib": [1, 2, 4], "chunk_kib": [1, 64, 512]}


@contextmanager
def coordinator(folder):
    """The part of one that answers questions of tuning, with its database."""
    worker = Worker(Store(open_engine(sqlite_url(folder / "tuning.db"))))
    tuning, loop = Tuning(worker, ServiceClock(1.0)), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work(tuning), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
        worker.close()
        worker.store.close()


def train(steps, **options):
    """Trains for so many steps; where the model is tuned, until some candidates have been compared."""
    model = seeded(mlp)
    optimizer = sgd(model)
    wrap(model, optimizer, **options)
    ddp = model.bagua_ddp
    cuts = []
    trials = torch.zeros(1)
    step = 0
    while step < steps and trials.item() < LEAST_TRIALS:
        optimizer.zero_grad()
        square(model, bagua.get_rank(), step).backward()
        optimizer.step()
        now = [len(bucket.names) for bucket in ddp.bagua_buckets]
        if not cuts or cuts[-1] != now:
            cuts.append(now)
        step += 1
        decider = getattr(ddp._tuner, "_decider", None)
        if decider is not None:
            trials.fill_(decider._tried)
        bagua.allreduce_inplace(trials, bagua.ReduceOp.MAX)
    check_identical(model)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    ddp.close()
    return {"weights": weights, "cuts": cuts, "steps": step, "decides": decider is not None}


def rank_tunes():
    bagua.init_process_group()
    tuned = train(MOST_STEPS, autotune=True, tune=TUNE)
    plain = train(tuned["steps"])
    with pytest.raises(ConfigError, match="can't be tuned"):
        train(1, autotune=True, tune={"learning_rate": [1]})
    return tuned, plain


def test_weights_are_those_of_a_job_that_is_not_tuned(ranks, tmp_path):
    with coordinator(tmp_path) as call:
        ranks.tune = lambda request: call(lambda tuning: tuning.answer(request))
        results = ranks.run(rank_tunes, hosts=[[0], [1]])
        (study,) = call(lambda tuning: tuning.studies())
        found = call(lambda tuning: tuning.study(study.id))
        line = call(lambda tuning: tuning.line("test"))
    for tuned, plain in results:
        assert tuned["steps"] == plain["steps"] < MOST_STEPS
        assert all(map(torch.equal, tuned["weights"], plain["weights"]))
        assert len(tuned["cuts"]) > 2, tuned  # buckets were cut anew, several times
        assert tuned["cuts"] == results[0][0]["cuts"]
    assert [tuned["decides"] for tuned, _ in results] == [True, False]
    assert found.tried >= LEAST_TRIALS and found.study.network_text.startswith("2 hosts of 1, ")
    assert all(set(one.setting) in ({"cuts"}, {"bucket_kib", "chunk_kib"}) for one in found.trials)
    assert all(one.seconds > 0 and one.reason for one in found.trials if one.state != "known")
    assert line


def rank_is_lost(recuts, codec):
    """Member 3 is killed before its seventh step, in the middle of a change of cuts where there is one."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(mlp).double() if codec is None else seeded(mlp)
    optimizer = sgd(model)
    algorithm = bagua.algorithms.Algorithm.init("gradient_allreduce", codec=codec)
    dies = 6 if member == 3 else -1
    tuner = functools.partial(Alternating, dies) if recuts else None
    ddp = model.bagua_ddp = BaguaDistributedDataParallel(model, [optimizer], algorithm, tuner=tuner)
    for step in range(10):
        if step == dies and not recuts:
            kill_self()
        optimizer.zero_grad()
        inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + member))
        model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
    bagua.barrier()
    return [one.detach().clone() for one in model.parameters()], [list(bucket.names) for bucket in ddp.bagua_buckets]


@pytest.mark.parametrize("codec", [None, pytest.param("onebit", marks=pytest.mark.full)])
def test_a_rank_that_is_lost_while_buckets_are_cut(ranks, codec):
    """The others have the new cuts, and no result is another one than without them (without a codec, whose arithmetic
    depends on cuts)."""
    found = []
    for recuts in (True, False) if codec is None else (True,):
        results = ranks.survive(rank_is_lost, (3,), hosts=[[0, 1], [2, 3]], recuts=recuts, codec=codec)
        ranks.close()
        for weights, cuts in results:
            assert all(map(torch.equal, weights, results[0][0])) and cuts == results[0][1]
        found.append(results[0])
    if codec is None:
        assert len(found[0][1]) == 1  # of 8 passes; without them they follow bytes
        assert all(map(torch.equal, found[0][0], found[1][0]))
