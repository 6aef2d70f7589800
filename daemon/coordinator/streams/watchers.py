"""Wakes callers that watch a job, and keeps each rank's last progress in memory.

A watcher is only told that something has changed, and reads the change from the store. So slow watchers cost no
memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from bagua.base.errors import UnavailableError
from bagua.proto import common_pb2

STOPPING = "the coordinator is stopping"
_MAX_RANKS = 1_024  # ranks of one job whose progress a watcher keeps
_MAX_JOBS = 1_000  # jobs whose last progress is kept
_MAX_REPORTS = 50_000  # of ranks, of all jobs together


class Watcher:
    """News that one caller of WatchJob (or of ReadLogs, which waits for ranks to come up) has not been told yet."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._changed = False
        self._progress: dict[int, common_pb2.Progress] = {}
        self._closed = False

    def close(self) -> None:
        """The coordinator stops: whoever waits gets UnavailableError."""
        self._closed = True
        self._wake.set()

    def notify(self) -> None:
        self._changed = True
        self._wake.set()

    def notify_progress(self, progress: common_pb2.Progress) -> None:
        if progress.rank in self._progress or len(self._progress) < _MAX_RANKS:
            self._progress[progress.rank] = progress
        self._wake.set()

    async def wait(self) -> tuple[bool, list[common_pb2.Progress]]:
        """Waits for something new; returns whether the job changed, and the newest progress per rank, since the last
        call. Raises UnavailableError when the coordinator stops.
        """
        await self._wake.wait()
        if self._closed:
            raise UnavailableError(f"{STOPPING} [BG802]")
        self._wake.clear()
        changed, progress = self._changed, list(self._progress.values())
        self._changed = False
        self._progress = {}
        return changed, progress


class Watchers:
    """Watchers by job."""

    def __init__(self) -> None:
        self._watchers: dict[str, set[Watcher]] = {}
        self._progress: dict[str, common_pb2.Progress] = {}
        self._reports: dict[str, dict[int, common_pb2.Progress]] = {}  # the newest of each rank, by job
        self._kept = 0  # of them
        self._closed = False

    @contextmanager
    def watch(self, job_id: str) -> Iterator[Watcher]:
        """A watcher that is told of every change from now on."""
        watcher = Watcher()
        if self._closed:
            watcher.close()
        self._watchers.setdefault(job_id, set()).add(watcher)
        try:
            yield watcher
        finally:
            rest = self._watchers[job_id]
            rest.discard(watcher)
            if not rest:
                del self._watchers[job_id]

    def watched(self) -> list[str]:
        """Ids of jobs that somebody watches."""
        return list(self._watchers)

    def close(self) -> None:
        """Ends all watches, now and later."""
        self._closed = True
        for watchers in self._watchers.values():
            for watcher in watchers:
                watcher.close()

    def notify(self, job_id: str) -> None:
        for watcher in self._watchers.get(job_id, ()):
            watcher.notify()

    def report(self, progress: common_pb2.Progress) -> None:
        kept = self._progress.pop(progress.job_id, None)  # the newest goes to the end
        from_program = kept is not None and not kept.by_itself
        self._progress[progress.job_id] = kept if kept is not None and progress.by_itself and from_program else progress
        self._keep_report(progress)
        if len(self._progress) > _MAX_JOBS:
            self._forget_report(next(iter(self._progress)))
        while self._kept > _MAX_REPORTS and len(self._progress) > 1:
            self._forget_report(next(iter(self._progress)))
        for watcher in self._watchers.get(progress.job_id, ()):
            watcher.notify_progress(progress)

    def _keep_report(self, progress: common_pb2.Progress) -> None:
        reports = self._reports.setdefault(progress.job_id, {})
        if progress.rank in reports or len(reports) < _MAX_RANKS:
            self._kept += progress.rank not in reports
            reports[progress.rank] = progress

    def _forget_report(self, job_id: str) -> None:
        del self._progress[job_id]
        self._kept -= len(self._reports.pop(job_id, {}))

    def reports(self, job_id: str) -> list[common_pb2.Progress]:
        """The newest report of each rank, of 1,024 at most."""
        return [self._reports[job_id][rank] for rank in sorted(self._reports.get(job_id, ()))]

    def progress(self, job_id: str) -> common_pb2.Progress | None:
        """The last report that the program of any rank made; else the last that the library made by itself."""
        return self._progress.get(job_id)
