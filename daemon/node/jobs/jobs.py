"""Holds the jobs of this node, running and ended, and carries the coordinator's directives to them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import math
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bagua
from bagua.base.disk import disk_words
from bagua.base.retention import Keep
from bagua.base.trees import remove_trees, walk_files
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.daemon.node.jobs.context import NodeContext
from bagua.daemon.node.jobs.engine_host import in_thread
from bagua.daemon.node.jobs.job import Job
from bagua.daemon.node.jobs.journal import KILL_S, JobEntry, end_leftovers
from bagua.daemon.node.logs.file import LogFile, log_path
from bagua.daemon.node.processes.process import kill_members
from bagua.daemon.node.rules import events
from bagua.daemon.node.rules.job_specification import (
    NO_HOST,
    SpecificationError,
    clamp_grace,
    is_safe_name,
    joining_members,
    parse_peers,
    parse_specification,
)
from bagua.proto import node_pb2

_EXPIRE_S = 600.0  # between two looks at what is old
_MEASURED = 100_000  # files of a job, at most, whose sizes count
MAX_SNAPSHOTS_BYTES = 2 << 20  # half of what the coordinator takes in one message


class EndedJob:
    """A job that is over here, of which its last message is left. ``before``: the running job that it was, while that
    is still being cleared away."""

    stopped = True

    def __init__(
        self, last: node_pb2.LocalJob, folder: Path | None = None, before: Job | EndedJob | None = None
    ) -> None:
        self._last = last
        self._folder = folder
        self._before = None if before is None or before.cleared else before

    @property
    def cleared(self) -> bool:
        if self._before is not None and self._before.cleared:
            self._before = None  # it need not be kept as long as its end
        return self._before is None

    async def clear(self) -> None:
        """Waits until ``cleared``."""
        if self._before is not None:
            await self._before.clear()

    @property
    def generation(self) -> int:
        return self._last.generation

    @property
    def numbers(self) -> set[int]:
        """Members that this node has had."""
        return {rank.member for rank in self._last.ranks}

    def snapshot(self) -> node_pb2.LocalJob:
        return self._last

    def log_of(self, member: int) -> LogFile | None:
        if self._folder is None or all(known.member != member for known in self._last.ranks):
            return None
        path = log_path(self._folder, member)
        return LogFile.of_the_past(path) if path.exists() else None


class Jobs:
    """Jobs of this node. ``on_report(job_id)``: something of that job has changed."""

    def __init__(self, node: NodeContext, on_report: Callable[[str], None]) -> None:
        self._node = node
        self._on_report = on_report
        self._held: dict[str, Job | EndedJob] = {}
        # Newer generations, while the older one is being stopped; StopJob: they were stopped meanwhile, too.
        self._next: dict[str, node_pb2.RunJob | node_pb2.StopJob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Condition()

    async def recover(self) -> None:
        """Ends what the previous process of the daemon left, and remembers the jobs that were over. Raises OSError if
        the journal can't be read at all; a journal that can't be written now is no reason to stay away."""
        gone = self._node.places.recover(self._node.keeper.notes.keys())
        entries, broken = self._node.journal.read_all()
        for path in broken:
            self._node.log.warning("a journal can't be understood and is put aside", path=str(path))
            with contextlib.suppress(OSError):  # the next start meets it again
                path.rename(path.with_name(f"{path.name}.broken"))
        for entry in entries:
            job_id = entry.job.job_id
            if not entry.ended:
                if not (ended := await self._resume(entry)):
                    continue
                self._node.log.warning("a job of an earlier life of this daemon is ended", job=job_id)
                await end_leftovers(entry, ended)
                try:
                    self._node.journal.write(entry)
                except OSError as error:  # the next life ends it again, which changes nothing
                    self._node.log.warning("the journal can't be written", error=disk_words(error))
            gone += self._node.places.leave(job_id)
            self._held[job_id] = EndedJob(entry.job, self._node.logs_folder / job_id)
        self._node.keeper.release_found()
        await self._end_groups()
        _remove(gone)
        await self._trim()

    async def _end_groups(self) -> None:
        """Ends what is left of jobs that no longer run here, and were ended by nobody: their keeper was killed."""
        running, groups = {job.job_id for job in self.running()}, self._node.groups
        for job_id in groups.jobs():
            if job_id not in running:
                await kill_members({}, (), KILL_S, self._node.keeper.pid, partial(groups.processes, job_id))
                groups.remove(job_id)

    async def _resume(self, entry: JobEntry) -> str:
        """Goes on with a job whose ranks have outlived the daemon. Else, why its part here ends."""
        job_id, keeper = entry.job.job_id, self._node.keeper
        restarted = f"the daemon on node {self._node.node_id} {keeper.death or 'was restarted'}"
        note = keeper.notes.get(job_id)
        if note is None:
            return restarted
        if (theirs := note.get("wire_version")) != WIRE_VERSION:
            now = f"bagua {bagua.__version__} (wire version {WIRE_VERSION})"
            return f"{restarted}, and the next one, {now}, can't talk with ranks of wire version {theirs}"
        try:
            run = node_pb2.RunJob.FromString(base64.b64decode(note["run"]))
            job = Job(parse_specification(run, self._node.node_id), self._node, self._on_report)
            await job.resume(note, {rank.member: rank for rank in entry.job.ranks})
        except Exception as error:  # the job goes on elsewhere, or ends with this reason
            self._node.log.error("a job can't go on with this daemon", job=job_id, exc_info=error)
            return restarted
        self._held[job_id] = job
        return ""

    def run(self, directive: node_pb2.RunJob) -> None:
        """Level-triggered: a job that runs already learns its peers, and who is to join; an older generation changes
        nothing, and neither does one that has ended here."""
        held, waiting = self._held.get(directive.job_id), self._next.get(directive.job_id)
        newer = held is None or directive.generation > held.generation
        if any(known is not None and directive.generation < known.generation for known in (held, waiting)):
            return
        if directive.spec.elastic and self._newcomers_alone(held, directive):
            self._begin_anew(held, directive, "other newcomers take over")
        elif directive.spec.elastic and (directive.generation > 1 if held is None else newer):
            self._go_on(held, directive)
        elif newer:
            self._begin_anew(held, directive, f"generation {directive.generation} takes over")
        elif isinstance(held, Job) and not held.stopped:
            self._again(held, directive)
        else:
            self._on_report(directive.job_id)

    def stop(self, directive: node_pb2.StopJob) -> None:
        """Stops a job. If it is not here, the coordinator is told that it has stopped."""
        held = self._held.get(directive.job_id)
        waiting = self._next.get(directive.job_id)
        if waiting is not None and directive.generation >= waiting.generation:
            self._next[directive.job_id] = directive
        if held is None:
            self._remember(node_pb2.LocalJob(job_id=directive.job_id, generation=directive.generation))
        elif directive.generation >= held.generation and isinstance(held, Job):
            reason = directive.reason or "the coordinator stopped the job"
            grace_s = 0.0 if held.held else clamp_grace(directive.grace_s)  # stopped processes can't end by themselves
            others = directive.others_go_on
            held.post(events.StopRequested(reason, grace_s, others_go_on=others))
        self._on_report(directive.job_id)

    def find(self, job_id: str) -> Job | EndedJob | None:
        return self._held.get(job_id)

    async def arrival(self, job_id: str) -> Job | EndedJob:
        """The job, as soon as the coordinator has sent it. The caller bounds the wait."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: job_id in self._held)
        return self._held[job_id]

    def snapshot(self, job_id: str) -> node_pb2.LocalJob | None:
        held = self._held.get(job_id)
        return held.snapshot() if held else None

    def snapshots(self) -> list[node_pb2.LocalJob]:
        """Returns all jobs that are not over, and of the newest that are as many as fit in a message: the coordinator
        may not have heard of their end.
        """
        found = [job.snapshot() for job in self.running()]
        room = MAX_SNAPSHOTS_BYTES - sum(job.ByteSize() for job in found)
        for held in reversed(self._held.values()):
            if held.stopped:
                last = held.snapshot()
                room -= last.ByteSize()
                if room < 0:
                    break
                found.append(last)
        return found

    def running(self) -> list[Job]:
        """Jobs that are not over here. Any thread."""
        # A copy: the loop may change the dict while another thread goes through it.
        return [held for held in list(self._held.values()) if isinstance(held, Job) and not held.stopped]

    def end(self, job_id: str, reason: str, grace_s: float) -> None:
        """Begins to end a job, for a reason that the coordinator is told."""
        self._next.pop(job_id, None)
        held = self._held.get(job_id)
        if isinstance(held, Job) and not held.stopped:
            held.post(events.StopRequested(reason, grace_s, error=reason))

    def set_fence(self, job_id: str, at: float, held: bool) -> None:
        """See ``Job.set_fence``."""
        if isinstance(job := self._held.get(job_id), Job):
            job.set_fence(at, held)

    async def stop_all(self, reason: str, grace_s: float, timeout_s: float) -> None:
        """Ends every job, telling the coordinator why; returns when they are over or the time has passed."""
        self._next.clear()
        if jobs := self.running():
            for job in jobs:
                self.end(job.job_id, reason, grace_s)
            waits = [asyncio.ensure_future(job.finished.wait()) for job in jobs]
            _, late = await asyncio.wait(waits, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _begin(self, directive: node_pb2.RunJob) -> None:
        try:
            spec = parse_specification(directive, self._node.node_id)
        except SpecificationError as error:
            text = f"node {self._node.node_id} can't run the job: {error}"
            self._node.log.error("a directive is refused", job=directive.job_id, error=str(error))
            self._remember(node_pb2.LocalJob(job_id=directive.job_id, generation=directive.generation, error=text))
            self._on_report(directive.job_id)
            return
        job = Job(spec, self._node, self._on_report)
        self._next.pop(spec.job_id, None)  # an older one, if any: its time has come in the same turn of the loop
        self._held.pop(spec.job_id, None)  # the newest last
        self._held[spec.job_id] = job
        job.start()
        _tell_peers(job, directive)
        self._on_report(spec.job_id)
        self._spawn_task(self._announce())

    def _newcomers_alone(self, held: Job | EndedJob | None, directive: node_pb2.RunJob) -> bool:
        """True if the node has to start newcomers and nothing of the job goes on here, so that they begin anew."""
        if directive.host_index != NO_HOST:
            return False
        if isinstance(held, Job) and not (held.ending or held.deserted):
            return False
        members = joining_members(directive, self._node.node_id)
        return bool(members) and not (held and set(members) <= held.numbers)

    def _begin_anew(self, held: Job | EndedJob | None, directive: node_pb2.RunJob, reason: str) -> None:
        """Begins the job, once what is held of it is over."""
        if held is None or held.cleared:
            self._begin(directive)
            return
        if isinstance(held, Job):
            held.post(events.StopRequested(reason, held.spec.stop_grace_s, others_go_on=True))
        self._begin_later(directive)

    def _again(self, held: Job, directive: node_pb2.RunJob) -> None:
        """The same generation once more, with what has become known meanwhile."""
        if directive.spec.elastic:
            self._go_on(held, directive)
        _tell_peers(held, directive)
        self._on_report(directive.job_id)

    def _go_on(self, held: Job | EndedJob | None, directive: node_pb2.RunJob) -> None:
        """The next generation of an elastic job: with what runs here, or nothing. It knows of no newcomers that were to
        begin here after the end of what is held."""
        self._next.pop(directive.job_id, None)
        if held is None or held.stopped:
            last = node_pb2.LocalJob(job_id=directive.job_id)
            if held is not None:
                last.CopyFrom(held.snapshot())
            last.generation = directive.generation
            self._remember(last)
        elif isinstance(held, Job):
            try:
                held.follow(parse_specification(directive, self._node.node_id), parse_peers(directive))
            except SpecificationError as error:
                held.post(events.EngineFailed(f"node {self._node.node_id} can't run the job: {error}"))
        self._on_report(directive.job_id)

    def _begin_later(self, directive: node_pb2.RunJob) -> None:
        waiting = self._next.get(directive.job_id)
        if isinstance(waiting, node_pb2.StopJob) and directive.generation <= waiting.generation:
            return
        self._next[directive.job_id] = directive
        if waiting is None:
            self._spawn_task(self._begin_after(directive.job_id))

    async def _begin_after(self, job_id: str) -> None:
        while (held := self._held.get(job_id)) is not None and not held.cleared:
            await held.clear()
        directive = self._next.pop(job_id, None)
        if isinstance(directive, node_pb2.RunJob):
            self._begin(directive)
        elif directive is not None:
            self._remember(node_pb2.LocalJob(job_id=directive.job_id, generation=directive.generation))
            self._on_report(directive.job_id)

    async def _announce(self) -> None:
        async with self._arrived:
            self._arrived.notify_all()
        await self._trim()

    def _remember(self, last: node_pb2.LocalJob) -> None:
        if not is_safe_name(last.job_id):  # it would become a path
            self._node.log.error("a directive names a job in a way that can't be right", job=last.job_id[:200])
            return
        last.phase = node_pb2.LOCAL_PHASE_STOPPED
        before = self._held.get(last.job_id)
        self._held[last.job_id] = EndedJob(last, self._node.logs_folder / last.job_id, before)
        self._spawn_task(self._announce())

    def _spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)  # the event loop itself refers to tasks weakly
        task.add_done_callback(self._tasks.discard)

    async def expire(self) -> None:
        """Forgets ended jobs, with their logs, as they become old, until cancelled."""
        while True:
            await asyncio.sleep(_EXPIRE_S)
            await self._trim()

    async def _trim(self) -> None:
        """Forgets ended jobs, with their logs: those beyond the number, the age and the size that are kept. The size
        alone never costs the newest one."""
        ended = [job_id for job_id, held in self._held.items() if held.stopped and held.cleared]
        known = {job_id: self._held[job_id] for job_id in ended}
        folders = self._node.jobs_folder, self._node.logs_folder
        try:
            old = await in_thread(lambda: past_keeping(folders[0], ended, self._node.keep, time.time()))
        except OSError:  # no thread can be started: the next look forgets them
            return
        trees: list[Path] = []
        # Else it has begun anew meanwhile.
        for job_id in [job_id for job_id in old if self._held.get(job_id) is known[job_id]]:
            del self._held[job_id]
            try:
                self._node.journal.remove(job_id)
            except OSError as error:  # the next life forgets it again
                self._node.log.warning("a job can't be forgotten", job=job_id, error=disk_words(error))
                continue
            trees += [folder / job_id for folder in folders]
        _remove(trees)


def _remove(trees: Sequence[Path]) -> None:
    """Removes them in a thread: they may be large, and ranks wait for this daemon."""
    with contextlib.suppress(OSError):  # no thread can be started: the next life removes them
        in_thread(lambda: remove_trees(trees))


def _tell_peers(job: Job, directive: node_pb2.RunJob) -> None:
    """Gives the engine the hosts' addresses. A node that has newcomers alone is not among the hosts yet: nothing."""
    if directive.host_index != NO_HOST and (peers := parse_peers(directive)):
        job.post(events.PeersKnown(peers))


def past_keeping(folder: Path, ended: Sequence[str], keep: Keep, now: float) -> list[str]:
    """Returns those of ``ended`` to forget, the oldest first. ``ended``: jobs, the oldest first, each with a folder of
    its name below ``folder``. The newest stays whatever its size. ``now``: seconds since the epoch.
    """
    gone = list(ended[: max(0, len(ended) - keep.jobs)])
    if math.isinf(keep.age_s) and math.isinf(keep.size):
        return gone
    room, full = keep.size, False
    kept: list[str] = []
    for job_id in reversed(ended[len(gone) :]):
        size, newest = _measure(folder / job_id)
        room -= size
        full = full or (room < 0 and bool(kept))
        if not full and now - newest <= keep.age_s:
            kept.append(job_id)
    return [job_id for job_id in ended if job_id not in set(kept)]


def _measure(folder: Path) -> tuple[int, float]:
    """Returns (bytes, when something was written last); of a folder that is not there: (0, infinity)."""
    size, newest = 0, -math.inf
    for path in (folder, *walk_files(folder, _MEASURED)):
        try:
            found = os.stat(path, follow_symlinks=False)
        except OSError:
            continue
        size += found.st_size
        newest = max(newest, found.st_mtime)
    return size, newest if size else math.inf
