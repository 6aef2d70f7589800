"""Jobs that tune themselves: results stay the same, and members that are lost or join do not break a step."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rig.ranks.engine_hosts import Ranks
from rig.ranks.faults import kill_self
from rig.ranks.recutting import Alternating

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.store.database import open_engine, sqlite_url
from bagua.daemon.coordinator.store.store import Store
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.use.tuning import Tuning
from bagua.proto.common_pb2 import TuneRequest
from bagua.proto.job_pb2 import Tuning as Found
from bagua.torch_api.compat.model import BaguaDistributedDataParallel
from bagua.torch_api.job.session import current

sys.path.insert(0, str(Path(__file__).parent))

from training_scenarios.support import check_identical, mlp, seeded, sgd, square, wrap

MOST_STEPS, LEAST_TRIALS = 3_000, 1
TUNE = {"bucket_kib": [1, 2, 4], "chunk_kib": [1, 64, 512]}


@contextmanager
def coordinator(folder: Path) -> Iterator[Any]:
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


def train(steps: int, **options: Any) -> dict[str, Any]:
    """Trains for so many steps; where the model is tuned, until some candidates have been compared."""
    model = seeded(mlp)
    optimizer = sgd(model)
    wrap(model, optimizer, **options)
    ddp: Any = model.bagua_ddp
    cuts: list[list[int]] = []
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


def rank_tunes() -> tuple[dict[str, Any], dict[str, Any]]:
    bagua.init_process_group()
    tuned = train(MOST_STEPS, autotune=True, tune=TUNE)
    plain = train(tuned["steps"])
    with pytest.raises(ConfigError, match="can't be tuned"):
        train(1, autotune=True, tune={"learning_rate": [1]})
    return tuned, plain


def test_weights_are_those_of_a_job_that_is_not_tuned(ranks: Ranks, tmp_path: Path) -> None:
    with coordinator(tmp_path) as call:
        ranks.tune = lambda request: call(lambda tuning: tuning.answer(request))
        results = ranks.run(rank_tunes, hosts=[[0], [1]])
        (study,) = call(lambda tuning: tuning.studies())
        found: Found = call(lambda tuning: tuning.study(study.id))
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


def rank_is_lost(recuts: bool, codec: str | None, dies_at: int) -> dict[str, Any]:
    """Member 3 is killed before its step ``dies_at``, in the middle of a change of cuts where there is one."""
    bagua.init_process_group()
    member = current().membership.member
    model = seeded(mlp).double() if codec is None else seeded(mlp)
    optimizer = sgd(model)
    algorithm = bagua.algorithms.Algorithm.init("gradient_allreduce", codec=codec)
    dies = dies_at if member == 3 else -1

    def make(*arguments: Any) -> Alternating:
        return Alternating(dies, *arguments)

    ddp = BaguaDistributedDataParallel(model, [optimizer], algorithm, tuner=make if recuts else None)
    model.bagua_ddp = ddp
    for step in range(10):
        if step == dies and not recuts:
            kill_self()
        optimizer.zero_grad()
        inputs = torch.randn(6, 10, generator=torch.Generator().manual_seed(100 * step + member))
        model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
    bagua.barrier()
    cuts = [list(bucket.names) for bucket in ddp.bagua_buckets]
    return {"weights": [one.detach().clone() for one in model.parameters()], "cuts": cuts}


@pytest.mark.parametrize("codec", [None, pytest.param("onebit", marks=pytest.mark.full)])
def test_a_rank_that_is_lost_while_buckets_are_cut(make_ranks: Any, tmp_path: Path, codec: str | None) -> None:
    """The others have the new cuts, and no result is another one than without them (without a codec, whose arithmetic
    depends on cuts)."""
    found = []
    for number, recuts in enumerate((True, False) if codec is None else (True,)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with make_ranks(folder) as ranks:
            arguments = {"recuts": recuts, "codec": codec, "dies_at": 6}
            ranks.start(rank_is_lost, hosts=[[0, 1], [2, 3]], elastic=True, **arguments)
            ranks.wait()
            found.append([one.result() for one in ranks.started if one.rank != 3])
            assert ranks.started[3].process.returncode != 0
    for results in found:
        for one in results:
            assert all(map(torch.equal, one["weights"], results[0]["weights"]))
            assert one["cuts"] == results[0]["cuts"]
    if codec is None:
        assert len(found[0][0]["cuts"]) == 1  # of 8 passes; without them they follow bytes
        for mine, other in zip(found[0][0]["weights"], found[1][0]["weights"], strict=True):
            assert torch.equal(mine, other)


def rank_goes_on() -> list[dict[str, str]]:
    bagua.init_process_group()
    model = seeded(mlp)
    optimizer = sgd(model)
    wrap(model, optimizer, autotune=True, tune=TUNE)
    ddp: Any = model.bagua_ddp
    seen: list[dict[str, str]] = []
    tried = torch.zeros(1)
    while not tried.item():
        optimizer.zero_grad()
        square(model, bagua.get_rank(), 0).backward()
        optimizer.step()
        if ddp._tuner._applied not in seen:
            seen.append(ddp._tuner._applied)
        decider = ddp._tuner._decider
        tried.fill_(0 if decider is None else decider._tried)
        bagua.allreduce_inplace(tried, bagua.ReduceOp.MAX)
    ddp.close()
    return seen


@pytest.mark.full
def test_the_next_job_begins_with_the_best_known_setting(make_ranks: Any, tmp_path: Path) -> None:
    best = {"bucket_kib": "2", "chunk_kib": "1"}
    with coordinator(tmp_path) as call:
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            with make_ranks(folder) as ranks:
                ranks.tune = lambda request: call(lambda tuning: tuning.answer(request))
                seen = ranks.run(rank_goes_on, hosts=[[0], [1]])[0]
            assert (best in seen) is (number == 1), seen
            (study,) = call(lambda tuning: tuning.studies())
            told = TuneRequest(job_id="test", study=study.study, present=best, settled=True)
            call(lambda tuning, told=told: tuning.answer(told))
