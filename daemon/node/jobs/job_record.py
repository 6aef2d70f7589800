"""Tells of a job, and keeps it: the report to the coordinator, and the file in the journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bagua.base.disk import disk_words
from bagua.daemon.node.jobs.engine_host import in_thread
from bagua.daemon.node.jobs.journal import JobEntry, Journal
from bagua.daemon.node.rules.state import JobState, Phase, Rank, RankPhase
from bagua.proto import common_pb2, node_pb2

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

MAX_ERROR_TAILS = 64
SHORT_REASON = 200
SAVE_AGAIN_S = 2.0

_RANK_STATES = {
    RankPhase.WAITING: common_pb2.RANK_STATE_WAITING,
    RankPhase.RUNNING: common_pb2.RANK_STATE_RUNNING,
    RankPhase.EXITED: common_pb2.RANK_STATE_EXITED,
}
LogPath = Callable[[int], Path | None]


def local_job(job_id: str, state: JobState, log_path: LogPath, patience_s: float = 0.0) -> node_pb2.LocalJob:
    """Returns everything that the coordinator may know of the job. It has the last words only of the first ranks to
    end: when a thousand ranks fail together, they must still fit in a message.
    """
    exited = sorted((rank for rank in state.present if rank.error_tail), key=lambda rank: rank.exited_at)
    with_tail = {rank.member for rank in exited[:MAX_ERROR_TAILS]}
    return node_pb2.LocalJob(
        job_id=job_id,
        generation=state.generation,
        phase=_phase(state.phase),
        engine_address=state.address,
        error=state.error,
        waiting=state.waiting,
        ranks=[
            _rank_status(state, local, rank, rank.member in with_tail, log_path)
            for group in (state.ranks, state.lobby, state.leaving)
            for local, rank in enumerate(group)
        ],
        suspended=state.suspended,
        suspended_hosts=state.lost_hosts,
        suspended_nodes=state.lost_nodes,
        accused_nodes=state.accused,
        passes=state.passes,
        withdrawn=state.withdrawn,
        takes_newcomers=state.takes_newcomers,
        entered=state.entered,
        patience_s=patience_s,
    )


def _phase(phase: Phase) -> node_pb2.LocalPhase.ValueType:
    if phase is Phase.STOPPED:
        return node_pb2.LOCAL_PHASE_STOPPED
    return node_pb2.LOCAL_PHASE_PREPARING if phase is Phase.PREPARING else node_pb2.LOCAL_PHASE_STARTED


def _rank_status(state: JobState, local: int, rank: Rank, with_tail: bool, log_path: LogPath) -> common_pb2.RankStatus:
    return common_pb2.RankStatus(
        rank=rank.rank,
        local_rank=local,
        node_id=state.node_id,
        state=_RANK_STATES[rank.phase],
        pid=rank.pid,
        exit_code=rank.exit_code,
        signal=rank.signal,
        error_tail=rank.error_tail if with_tail else "",
        reason=_reason(rank, with_tail),
        log_path=str(log_path(rank.member) or ""),
        exited_at=rank.exited_at,
        follows=rank.follows,
        member=rank.member,
        left=state.elastic and (rank.left or rank.lost),
        newcomer=rank.newcomer,
        ready_to_join=rank.ready,
    )


def _reason(rank: Rank, whole: bool) -> str:
    """A rank that is lost, and has told so, may live on for a moment: it has not failed."""
    if rank.told_lost and rank.phase is not RankPhase.EXITED:
        return ""
    return rank.reason if whole or not rank.error_tail else rank.reason[:SHORT_REASON]


def journal_entry(
    job_id: str, state: JobState, log_path: LogPath, rank_socket: Path, start_time: Callable[[int], int]
) -> JobEntry:
    """The job as the next life of the daemon must find it, with ranks of former generations."""
    job = local_job(job_id, state, log_path)
    for local, rank in enumerate(state.gone):
        job.ranks.append(_rank_status(state, local, rank, False, log_path))
    start_times = {rank.pid: start_time(rank.pid) for rank in state.everybody}
    return JobEntry(job, state.adopt, str(rank_socket), start_times)


class JobRecord:
    """Keeps the job's file in the journal as ``entry`` says. A full disk must not end a job that runs, nor keep its end
    from being told: what can't be written is tried again until it is done."""

    def __init__(self, job_id: str, journal: Journal, entry: Callable[[], JobEntry], log: FilteringBoundLogger) -> None:
        self._job_id = job_id
        self._journal = journal
        self._entry = entry
        self._log = log
        self._lock = asyncio.Lock()
        self._wanted = self._done = 0
        self._again: asyncio.Task[None] | None = None

    async def save(self) -> None:
        """Writes the file as things are when the disk is free; several calls that wait for it make one write."""
        self._wanted += 1
        wanted = self._wanted
        async with self._lock:
            if self._done >= wanted:
                return
            self._done = self._wanted  # the entry is as of now: it serves all who have asked by now
            entry = self._entry()
            try:
                await in_thread(lambda: self._journal.write(entry))
            except OSError as error:
                if self._again is None or self._again.done():
                    self._log.warning("the journal can't be written; it is tried again", error=disk_words(error))
                    self._again = asyncio.get_running_loop().create_task(self._save_again())

    async def _save_again(self) -> None:
        while self._journal.owes(self._job_id):
            await asyncio.sleep(SAVE_AGAIN_S)
            with contextlib.suppress(OSError):
                await in_thread(lambda: self._journal.write_owed(self._job_id))
        self._log.info("the journal is written again")
