"""Keeps archives of users' code: callers upload them, nodes of a job fetch them, and they go when no job needs them.

They lie in the database, in pieces, because several coordinators may share it. An upload is checked before anything of
it is written there.
"""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import IO, TYPE_CHECKING

import sqlalchemy as sa
import structlog

from bagua.base import code_archive
from bagua.base.errors import InvalidRequestError, NotFoundError, ServiceError, TooMuchError
from bagua.daemon.coordinator.rules.clock import ServiceClock
from bagua.daemon.coordinator.rules.identity import CURRENT, EVERYWHERE
from bagua.daemon.coordinator.store.store import Transaction
from bagua.daemon.coordinator.store.worker import Worker
from bagua.proto import common_pb2, job_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOTAL_BYTES = 2 << 30  # of all archives
MAX_MESSAGE_BYTES = 1 << 20
KEEP_S = 86_400.0  # an archive that no unfinished job needs goes so long after its last use
SPARE_S = 600.0  # so long after its last use it is not given up for others: a job that needs it may be on its way
_UPLOADS = 16  # at the same time
_UPLOADS_OF_ACCOUNT = 4
_FIRST_UPLOADS = 64  # an account without any may begin one up to this many in all: four accounts keep nobody out
_WAIT_S = 120.0  # for a place among them
_PACE = 32 << 10  # bytes a second that an upload makes at least
_GRACE_S = 30.0  # that it may be late
_PIECES_AT_ONCE = 8  # in one transaction: others wait for that
_EVERY_S = 60.0

log = structlog.get_logger("coordinator.code")


class CodeArchives:
    """Use from the event loop; the database and files are used in threads."""

    def __init__(self, worker: Worker, clock: ServiceClock, max_total_bytes: int = MAX_TOTAL_BYTES) -> None:
        self._worker = worker
        self._clock = clock
        self._max_total_bytes = max_total_bytes
        self._uploads: Counter[str] = Counter()  # by account
        self._ended = asyncio.Condition()

    async def find(self, archive: common_pb2.CodeArchive, namespace: str = EVERYWHERE) -> bool:
        """True if the archive is here, sent by that namespace. It then stays for some minutes at least. Raises
        InvalidRequestError."""
        _check(archive)
        return await self._use(archive, namespace)

    async def need(self, archive: common_pb2.CodeArchive, namespace: str = EVERYWHERE) -> None:
        """Keeps it for a job that is about to be submitted. Raises InvalidRequestError if it is not here."""
        if not await self.find(archive, namespace):
            raise InvalidRequestError(
                f"spec.code: this coordinator has no archive {archive.digest[:12]}…: upload it before the job. [BG815]"
            )

    async def put(self, messages: AsyncIterator[job_pb2.PutCodeRequest], namespace: str = EVERYWHERE) -> None:
        """Takes an archive from a namespace, also if another namespace has sent the same: nobody gets code by its
        digest alone. Raises InvalidRequestError if its bytes are not those that it is named by, TooMuchError if there
        is no room."""
        first = await _next(messages, time.monotonic() + _GRACE_S)
        archive = first.archive
        _check(archive)
        async with self._place(CURRENT.get().name):
            if await self._use(archive, namespace):
                return
            with await asyncio.to_thread(_temporary_file) as file:
                await _receive(first.data, messages, archive, file)
                if await self._use(archive, EVERYWHERE):  # another namespace has sent it before
                    await self._complete(archive.digest, namespace)
                    return
                await self._worker.write(lambda tx: self._make_room(tx, archive.bytes, namespace))
                await self._store_pieces(archive, file, namespace)
        log.info("code_stored", digest=archive.digest, bytes=archive.bytes, files=archive.files)

    @asynccontextmanager
    async def _place(self, account: str) -> AsyncIterator[None]:
        """Keeps a place of an account's, so that slow ones of one account keep nobody else out. Raises TooMuchError."""
        try:
            async with asyncio.timeout(_WAIT_S), self._ended:
                await self._ended.wait_for(
                    lambda: (
                        self._uploads[account] < _UPLOADS_OF_ACCOUNT
                        and self._uploads.total() < (_UPLOADS if self._uploads[account] else _FIRST_UPLOADS)
                    )
                )
                self._uploads[account] += 1
        except TimeoutError as error:
            raise TooMuchError(
                f"Too many uploads of code (one account has {_UPLOADS_OF_ACCOUNT} at most): no place came free within "
                f"{_WAIT_S:g} s. Try again later. [BG814]"
            ) from error
        try:
            yield
        finally:
            self._uploads[account] -= 1
            self._uploads += Counter()  # forgets accounts without any
            async with self._ended:
                self._ended.notify_all()

    async def _store_pieces(self, archive: common_pb2.CodeArchive, file: IO[bytes], namespace: str) -> None:
        """Stores the pieces in small transactions, so that other writers come between. An archive that was begun and
        not completed is deleted later, as old ones are.
        """
        file.seek(0)
        now = self._clock.wall()
        await self._worker.write(lambda tx: tx.begin_code(archive.digest, archive.bytes, now))
        for number in range(0, code_archive.pieces_of(archive.bytes), _PIECES_AT_ONCE):
            data = await asyncio.to_thread(file.read, _PIECES_AT_ONCE * code_archive.PIECE_BYTES)
            await self._worker.write(partial(_add_pieces, archive.digest, number, data))
        await self._complete(archive.digest, namespace)

    async def _use(self, archive: common_pb2.CodeArchive, namespace: str) -> bool:
        now = self._clock.wall()
        return await self._worker.write(lambda tx: tx.use_code(archive.digest, archive.bytes, now, namespace))

    async def _complete(self, digest: str, namespace: str) -> None:
        now = self._clock.wall()
        await self._worker.write(lambda tx: tx.complete_code(digest, now, namespace))

    async def piece(self, job_id: str, number: int) -> bytes:
        """Returns one piece of the archive that a job needs. Raises NotFoundError."""
        plausible = len(job_id) <= 64 and "\0" not in job_id
        found = await self._worker.read(lambda tx: tx.code_piece(job_id, number)) if plausible else None
        if found is None:
            raise NotFoundError(f"Job {job_id[:64]} has no archive of code here, or none with piece {number}. [BG815]")
        return found

    async def run(self) -> None:
        """Deletes archives that no job needs any more, until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            try:
                await self.expire()
            except (ServiceError, sa.exc.SQLAlchemyError) as error:
                log.warning("old_code_stays", error=str(error))

    async def expire(self) -> Sequence[str]:
        """Gives up those that were not used for ``KEEP_S``; their digests."""
        before = self._clock.wall() - KEEP_S
        old = [digest for digest, _ in await self._worker.read(lambda tx: tx.idle_code(before))]
        for digest in old:
            await self._worker.write(partial(Transaction.forget_code, digest=digest))
        return old

    # ---- in a thread

    def _make_room(self, tx: Transaction, size: int, namespace: str) -> None:
        """One namespace has at most half of the room."""
        most = self._max_total_bytes
        limits = {namespace: most // 2, EVERYWHERE: most}  # in this order
        for whose, limit in limits.items():
            excess = tx.code_bytes(whose) + size - limit
            for digest, freed in tx.idle_code(self._clock.wall() - SPARE_S, whose):
                if excess <= 0:
                    break
                tx.forget_code(digest)
                excess -= freed
            if excess > 0:
                raise TooMuchError(
                    f"The coordinator holds {limit >> 20} MiB of code at most"
                    f"{'' if whose == EVERYWHERE else f' of the namespace {whose}'}, and unfinished jobs need what is "
                    f"there: {excess >> 10} KiB are missing. Wait for one of them to end, or cancel one. [BG814]"
                )


def _add_pieces(digest: str, first: int, data: bytes, tx: Transaction) -> None:
    size = code_archive.PIECE_BYTES
    for number, begin in enumerate(range(0, len(data), size), first):
        tx.add_code_piece(digest, number, data[begin : begin + size])


def _temporary_file() -> IO[bytes]:
    return tempfile.TemporaryFile(prefix="bagua-code-")


def _check(archive: common_pb2.CodeArchive) -> None:
    if why := code_archive.problem(archive.digest, archive.bytes):
        raise InvalidRequestError(f"The archive of code can't be right: {why}. [BG815]")


async def _next(messages: AsyncIterator[job_pb2.PutCodeRequest], deadline: float) -> job_pb2.PutCodeRequest:
    """Raises InvalidRequestError where no message comes."""
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await anext(messages)
    except TimeoutError as error:
        raise InvalidRequestError(
            f"An upload of code was {_GRACE_S:g} s late: it needs {_PACE >> 10} KiB a second at least. [BG815]"
        ) from error
    except StopAsyncIteration as error:
        raise InvalidRequestError("An upload of code ended before all of its bytes came. [BG815]") from error


async def _receive(
    data: bytes,
    messages: AsyncIterator[job_pb2.PutCodeRequest],
    archive: common_pb2.CodeArchive,
    file: IO[bytes],
) -> None:
    """Writes an archive into ``file``; ``data`` came with the first message. Raises InvalidRequestError."""
    digest, size, began = hashlib.sha256(), 0, time.monotonic()
    while True:
        if len(data) > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(f"A message of an upload has {MAX_MESSAGE_BYTES} bytes of data at most. [BG815]")
        size += len(data)
        if size > archive.bytes:
            raise InvalidRequestError(f"More bytes of code came than the {archive.bytes} that were announced. [BG815]")
        digest.update(data)
        await asyncio.to_thread(file.write, data)
        if size == archive.bytes:
            break
        data = (await _next(messages, began + _GRACE_S + size / _PACE)).data
    if digest.hexdigest() != archive.digest:
        raise InvalidRequestError("The bytes of code that came have another SHA-256 than was announced. [BG815]")
