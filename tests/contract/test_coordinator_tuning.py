"""Trials of jobs that tune themselves, in every database."""

import pytest

from bagua.base.errors import InvalidRequestError, NotFoundError
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.store.store import Store
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.use.tuning import Tuning
from bagua.proto.common_pb2 import TuneDimension, TuneRequest, TuneStudy, TuneTrial

SPACE = [TuneDimension(name="bucket_kib", choices=["256", "512", "1024"], ordered=True)]


@pytest.fixture
def tuning(open_database):
    worker = Worker(Store(open_database()))
    yield Tuning(worker, ServiceClock(1.0))
    worker.close()


def request(job_id="job-1", model="m", network="n", **fields):
    study = TuneStudy(model=model, network=network, model_text="a model", network_text="a wire", space=SPACE)
    return TuneRequest(job_id=job_id, rank=0, study=study, **fields)


def trial(number, setting, level, round=0):
    return TuneTrial(number=number, setting=setting, ratio=level, level=level, state="not better", round=round)


async def search(tuning, job_id, round=0):
    """The candidates of one search, each of which is better the larger it is."""
    seen = []
    reply = await tuning.answer(request(job_id, ask=True, round=round))
    while not reply.exhausted:
        seen.append(reply.candidate["bucket_kib"])
        told = trial(10 * round + len(seen), dict(reply.candidate), 256 / int(seen[-1]), round)
        reply = await tuning.answer(request(job_id, ask=True, round=round, trials=[told, told]))  # said twice
    return seen, reply


async def test_a_search_has_an_end_and_the_next_job_begins_with_what_it_found(tuning):
    seen, reply = await search(tuning, "job-1")
    assert sorted(seen) == ["1024", "256", "512"]
    assert not reply.has_best
    told = request(settled=True, present={"bucket_kib": "1024"}, line="Tuning is settled.")
    assert not (await tuning.answer(told)).has_best
    assert await tuning.line("job-1") == "Tuning is settled."
    assert await tuning.line("job-2") == ""
    reply = await tuning.answer(request("job-2"))
    assert reply.has_best and dict(reply.best) == {"bucket_kib": "1024"}
    assert not (await tuning.answer(request("job-3", network="another"))).has_best
    assert sorted((await search(tuning, "job-2"))[0]) == ["1024", "256", "512"]  # its own measurements count
    assert len((await search(tuning, "job-2", round=1))[0]) == 3  # after a change for good
    assert not (await tuning.studies())[0].settled  # it searches; the setting stays known
    assert dict((await tuning.answer(request("job-4"))).best) == {"bucket_kib": "1024"}


async def test_what_was_found_is_shown_and_forgotten(tuning):
    await search(tuning, "job-1")
    await tuning.answer(request("job-2", network="another"))
    studies = await tuning.studies()
    assert [(one.job_id, one.tried, one.settled) for one in studies] == [("job-2", 0, False), ("job-1", 3, False)]
    shown = await tuning.study(studies[1].id[:8])
    assert [(one.number, one.job_id) for one in shown.trials] == [(1, "job-1"), (2, "job-1"), (3, "job-1")]
    assert shown.study.model_text == "a model"
    for wrong in ("", "%", "zz"):
        with pytest.raises(NotFoundError):
            await tuning.study(wrong)
    assert await tuning.forget(shown.id, False) == [shown.id]
    with pytest.raises(NotFoundError, match="bagua tune list"):
        await tuning.study(shown.id)
    assert await tuning.forget("", True) == [studies[0].id]
    assert await tuning.studies() == []


async def test_what_is_too_large_is_refused(tuning):
    for wrong in (
        request(model=""),
        request(line="x" * 3_000),
        request(present={"cuts": "1," * 100_000}),
        request(trials=[trial(number, {}, 1.0) for number in range(100)]),
    ):
        with pytest.raises(InvalidRequestError):
            await tuning.answer(wrong)
    assert await tuning.studies() == []
