"""Archives of code in every database: how they come, when they go, and who shares them."""

import asyncio
import hashlib
from dataclasses import replace

import pytest

from bagua.base.code_archive import PIECE_BYTES
from bagua.base.errors import InvalidRequestError, NotFoundError, TooMuchError
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState
from bagua.daemon.coordinator.rules.identity import CURRENT, Identity, Role
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.daemon.coordinator.store.store import Store
from bagua.daemon.coordinator.store.worker import Worker
from bagua.daemon.coordinator.use import code_archives
from bagua.daemon.coordinator.use.code_archives import KEEP_S, CodeArchives
from bagua.proto.common_pb2 import CodeArchive, JobSpec
from bagua.proto.job_pb2 import PutCodeRequest

LIMIT = 1_000_000
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
"""For what comes to no database."""


class Clock(ServiceClock):
    """Wall time that the test sets."""

    now_s = 1_000_000.0

    def wall(self):
        return self.now_s


class Stand:
    def __init__(self, worker):
        self.store, self.clock = worker.store, Clock(1.0)
        self.code = CodeArchives(worker, self.clock, max_total_bytes=LIMIT)

    def job(self, archive, job_id="job-1", state=JobState.PENDING):
        spec = checked_spec(JobSpec(entry="t.py", nnodes=1, nproc_per_node=1, code=archive))
        with self.store.transaction() as tx:
            assert tx.create_job(replace(JobRecord(job_id, spec, 1.0, job_key=b"k"), state=state), None, "me")


@pytest.fixture
def stands(open_database):
    workers = []

    def make():
        workers.append(Worker(Store(open_database())))
        return Stand(workers[-1])

    yield make
    for worker in workers:
        worker.close()


def named(data):
    return CodeArchive(digest=hashlib.sha256(data).hexdigest(), bytes=len(data), files=1)


async def upload(archive, *parts):
    yield PutCodeRequest(archive=archive)
    for part in parts:
        yield PutCodeRequest(data=part)


async def test_an_archive_comes_and_a_job_gets_its_pieces(stands):
    first, second = stands(), stands()
    data = bytes(range(256)) * 1500 + b"end"
    archive = named(data)
    assert not await first.code.find(archive)
    with pytest.raises(InvalidRequestError, match="upload it before the job"):
        await first.code.need(archive)
    await first.code.put(upload(archive, data[:1000], b"", data[1000:]))
    await first.code.put(upload(archive))  # it is there
    for one in (first, second):  # another coordinator has it, too
        assert await one.code.find(archive)
        await one.code.need(archive)
    first.job(archive)
    pieces = [await second.code.piece("job-1", number) for number in range(2)]
    assert b"".join(pieces) == data and len(pieces[0]) == PIECE_BYTES
    for job_id, number in (("job-1", 2), ("job-2", 0), ("x" * 65, 0), ("\0", 0)):
        with pytest.raises(NotFoundError):
            await second.code.piece(job_id, number)


@on_sqlite
async def test_an_upload_is_checked(stands):
    code = stands().code
    good = named(b"abc")
    for archive, parts, words in (
        (good, (b"abd",), "another SHA-256"),
        (good, (b"abcd",), "More bytes"),
        (good, (b"ab",), "ended before"),
        (good, (b"x" * (1 << 20) + b"x",), "bytes of data at most"),
        (CodeArchive(digest="A" * 64, bytes=3), (), "no SHA-256"),
        (CodeArchive(digest="../../etc", bytes=3), (), "no SHA-256"),
        (CodeArchive(digest=good.digest, bytes=0), (), "1 to"),
        (CodeArchive(digest=good.digest, bytes=1 << 40), (), "1 to"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            await code.put(upload(archive, *parts))
        if words != "1 to" and "SHA-256" not in words:
            assert not await code.find(good)


async def drip(archive, ends):
    """An upload that sends a byte, and then nothing until ``ends``."""
    yield PutCodeRequest(archive=archive)
    yield PutCodeRequest(data=b"x")
    await ends.wait()


@on_sqlite
@pytest.mark.parametrize("accounts", [1, 5])
async def test_slow_uploads_keep_no_other_account_out(stands, accounts):
    code, ends = stands().code, asyncio.Event()
    slow = []
    for n in range(20):
        CURRENT.set(Identity(f"eve-{n % accounts}", Role.SUBMIT, "red"))
        slow.append(asyncio.ensure_future(code.put(drip(named(bytes([n]) * 9), ends), "red")))
    while code._uploads.total() < min(4 * accounts, 16):
        await asyncio.sleep(0)
    CURRENT.set(Identity("ann", Role.SUBMIT, "blue"))
    await code.put(upload(named(b"ann's"), b"ann's"), "blue")
    assert await code.find(named(b"ann's"), "blue")
    ends.set()
    assert all(isinstance(one, InvalidRequestError) for one in await asyncio.gather(*slow, return_exceptions=True))


@on_sqlite
async def test_an_upload_ends_that_is_too_slow(stands, monkeypatch):
    monkeypatch.setattr(code_archives, "_GRACE_S", 0.1)
    monkeypatch.setattr(code_archives, "_UPLOADS_OF_ACCOUNT", 1)
    code, ends = stands().code, asyncio.Event()
    with pytest.raises(InvalidRequestError, match="KiB a second at least"):
        await code.put(drip(named(b"slow"), ends))
    monkeypatch.setattr(code_archives, "_WAIT_S", 0.0)
    monkeypatch.setattr(code_archives, "_GRACE_S", 60.0)
    first = asyncio.ensure_future(code.put(drip(named(b"slow"), ends)))
    while not code._uploads:
        await asyncio.sleep(0)
    with pytest.raises(TooMuchError, match="Try again later"):
        await code.put(upload(named(b"x"), b"x"))
    ends.set()
    with pytest.raises(InvalidRequestError, match="ended before"):
        await first
    assert not code._uploads


async def test_a_namespace_has_half_of_the_room(stands):
    stand = stands()
    first, second = (bytes([number]) * 300_000 for number in range(2))
    await stand.code.put(upload(named(first), first), "red")
    with pytest.raises(TooMuchError, match="of the namespace red"):
        await stand.code.put(upload(named(second), second), "red")
    await stand.code.put(upload(named(second), second), "blue")
    assert await stand.code.find(named(second), "blue") and not await stand.code.find(named(second), "red")


async def test_what_no_job_needs_goes(stands):
    stand = stands()
    archives = [named(name) for name in (b"idle", b"ended", b"needed")]
    for archive, data in zip(archives, (b"idle", b"ended", b"needed"), strict=True):
        await stand.code.put(upload(archive, data))
    stand.job(archives[1], "job-ended", JobState.FAILED)
    stand.job(archives[2], "job-needed", JobState.RUNNING)
    assert await stand.code.expire() == []
    stand.clock.now_s += KEEP_S + 1
    assert sorted(await stand.code.expire()) == sorted([archives[0].digest, archives[1].digest])
    assert [await stand.code.find(archive) for archive in archives] == [False, False, True]
    assert await stand.code.piece("job-needed", 0) == b"needed"


async def test_the_total_is_bounded(stands):
    stand = stands()
    old, needed, new = (bytes([number]) * 400_000 for number in range(3))
    await stand.code.put(upload(named(old), old))
    await stand.code.put(upload(named(needed), needed))
    stand.job(named(needed))
    with pytest.raises(TooMuchError, match="KiB are missing"):  # both were just used
        await stand.code.put(upload(named(new), new))
    stand.clock.now_s += 3600
    await stand.code.put(upload(named(new), new))
    assert not await stand.code.find(named(old))
    assert await stand.code.find(named(needed)) and await stand.code.find(named(new))
