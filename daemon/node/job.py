"""Runs one job on this node: carries out the state machine's instructions and posts their outcomes as events."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagua.base.disk import FULL, disk_words
from bagua.base.errors import BaguaError
from bagua.base.memory_kills import MemoryWatch
from bagua.daemon.node import events, launch, state, transitions
from bagua.daemon.node.engine_host import CoreHost, in_thread, make_engine, wanted_plugin
from bagua.daemon.node.job_specification import JobSpecification
from bagua.daemon.node.journal import JobEntry, Journal, RankEntry
from bagua.daemon.node.log_file import LogFile, LogLimits, log_path
from bagua.daemon.node.logs import RankOutput
from bagua.daemon.node.proc import marks_of, start_time
from bagua.daemon.node.process import ProcessWatch, Reaper, kill_members, signal_group
from bagua.daemon.node.runtime_dir import data_socket, remove_sockets
from bagua.daemon.node.settings import WireSettings
from bagua.daemon.node.state import Phase, RankPhase
from bagua.proto import common_pb2, node_pb2

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from bagua.csrc import core

LEFTOVER_KILL_S = 5.0
SAVE_AGAIN_S = 2.0
MAX_ERROR_TAILS = 64
WAITS_EVERY_S = 5.0
WAITS_LONGER_THAN_S = 10.0

_EXPECTED = (launch.LaunchError, BaguaError, OSError, RuntimeError)

_RANK_STATES = {
    RankPhase.WAITING: common_pb2.RANK_STATE_WAITING,
    RankPhase.RUNNING: common_pb2.RANK_STATE_RUNNING,
    RankPhase.EXITED: common_pb2.RANK_STATE_EXITED,
}


@dataclass(frozen=True)
class NodeContext:
    """What all jobs of the daemon share."""

    node_id: str
    data_host: str
    wire: WireSettings
    jobs_folder: Path
    socket_folder: Path
    rank_socket: Path
    cache: Path
    journal: Journal
    core: CoreHost
    reaper: Reaper
    lease_over: Callable[[], bool]
    log: FilteringBoundLogger
    log_limits: LogLimits
    environment: Mapping[str, str]  # of which ranks get what the job does not say otherwise


class Job:
    """One job: one generation, or, if it is elastic, one after the other. Everything happens in the event loop;
    blocking calls run in threads of their own. Whatever belongs to a process is kept by its member number.

    ``on_report`` is called whenever what the coordinator should know has changed.
    """

    def __init__(self, spec: JobSpecification, node: NodeContext, on_report: Callable[[str], None]) -> None:
        self.spec = spec
        self.state = state.new_job(
            node.node_id,
            spec.ranks,
            adopt=spec.adopt,
            grace_s=spec.stop_grace_s,
            join_s=spec.join_timeout_s,
            elastic=spec.elastic,
            generation=spec.generation,
        )
        self.engine: core.Engine | None = None
        self.data_socket = data_socket(node.socket_folder, spec.job_id, spec.generation)
        self._engine_failed = False
        self._engine_generation = spec.generation
        self._regrouping = asyncio.Lock()
        self.tokens = {rank: secrets.token_bytes(32) for rank in spec.ranks}
        self._node = node
        self._on_report = on_report
        self._log = node.log.bind(job=spec.job_id, generation=spec.generation)
        self._loop = asyncio.get_running_loop()
        self._core: Any = None
        self._plugin: Path | None = None
        self._secrets: dict[str, str] = {}  # until the ranks have them
        self._queue: deque[events.Event] = deque()
        self._stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepared = asyncio.Event()
        self._finished = asyncio.Event()
        self._save_lock = asyncio.Lock()
        self._saves_wanted = self._saves_done = 0
        self._outputs: dict[int, RankOutput] = {}
        self._watches: dict[int, ProcessWatch] = {}
        self._joined: dict[int, int] = {}  # member -> pid that got the way to the engine
        self._start_times: dict[int, int] = {}
        self._memory: dict[int, MemoryWatch] = {}

    # ── for the daemon ──

    @property
    def job_id(self) -> str:
        return self.spec.job_id

    @property
    def generation(self) -> int:
        return self.spec.generation

    def knows(self, rank: int) -> bool:
        """True if a process here has, or had, this number."""
        return rank in self.tokens or rank in self.spec.ranks

    @property
    def stopped(self) -> bool:
        return self.state.phase is Phase.STOPPED

    @property
    def busy(self) -> bool:
        """True while something happens here that does not need the coordinator."""
        preparing_or_ending = (Phase.PREPARING, Phase.TERMINATING, Phase.KILLING, Phase.CLOSING)
        return bool(self.state.alive) or self.state.phase in preparing_or_ending

    def regroup(self, spec: JobSpecification, peers: tuple[str, ...]) -> None:
        """The coordinator has decided the next generation of an elastic job: nothing of it is stopped that stays in."""
        unknown = set(spec.members) - {rank.member for rank in self.state.ranks}
        if unknown:
            text = f"node {self._node.node_id} has no members {sorted(unknown)}"
            self.post(events.EngineFailed(f"{text}, which generation {spec.generation} of the job needs here"))
            return
        self.spec = spec
        self._log = self._node.log.bind(job=spec.job_id, generation=spec.generation)
        self._log.info("job goes on", ranks=list(spec.ranks), members=list(spec.members))
        self.post(events.Regrouped(spec.generation, spec.ranks, spec.members, peers))
        self._run(self._save())

    def start(self) -> None:
        self._log.info("job begins", ranks=list(self.spec.ranks), adopt=self.spec.adopt)
        self._run(self._prepare())

    def post(self, event: events.Event) -> None:
        """Hands an event to the state machine and does what it says."""
        self._queue.append(event)
        if self._stepping:
            return
        self._stepping = True
        try:
            while self._queue:
                self._step(self._queue.popleft())
        finally:
            self._stepping = False

    async def finished(self) -> None:
        """Returns when nothing of the job is left on this node and the journal says so."""
        await self._finished.wait()

    def log_of(self, member: int) -> LogFile | None:
        """The log of a local rank that was started."""
        output = self._outputs.get(member)
        return output.log if output else None

    def snapshot(self) -> node_pb2.LocalJob:
        """Everything that the coordinator may know of the job. Of the last words only those of the first to end: when
        a thousand ranks fail together, they must still fit in a message."""
        exited = sorted((rank for rank in self.state.ranks if rank.error_tail), key=lambda rank: rank.exited_at)
        with_tail = {rank.member for rank in exited[:MAX_ERROR_TAILS]}
        if self.stopped:
            phase = node_pb2.LOCAL_PHASE_STOPPED
        elif self.state.phase is Phase.PREPARING:
            phase = node_pb2.LOCAL_PHASE_PREPARING
        else:
            phase = node_pb2.LOCAL_PHASE_STARTED
        return node_pb2.LocalJob(
            job_id=self.job_id,
            generation=self.generation,
            phase=phase,
            engine_address=self.state.address,
            error=self.state.error,
            waiting=self.state.waiting,
            ranks=[self._rank_status(rank, rank.member in with_tail) for rank in self.state.ranks],
            suspended=self.state.suspended,
            suspended_hosts=self.state.lost_hosts,
            withdrawn=self.state.withdrawn,
        )

    # ── for ranks ──

    async def prepared(self) -> None:
        """Returns when the engine listens, or the job has failed or was stopped before."""
        await self._prepared.wait()

    def admit(self, rank: int, pid: int) -> bool:
        """Lets the process ``pid`` be the member ``rank``. False if the rank has joined before, or has ended. A process
        that asks again before it connected gets the same answer."""
        known = next(known for known in self.state.ranks if known.member == rank)
        if known.phase is RankPhase.EXITED or known.connected or self._joined.get(rank, pid) != pid:
            return False
        self._joined[rank] = pid
        self._memory.setdefault(rank, MemoryWatch(pid))
        self.post(events.RankJoined(rank, pid))
        if self.spec.adopt and rank not in self._watches:
            with contextlib.suppress(
                OSError
            ):  # it has died already, or lives in another pid namespace: the core will know
                self._watches[rank] = ProcessWatch(pid, lambda code: self._adopted_process_ended(rank))
        return True

    # ── the machine ──

    def _step(self, event: events.Event) -> None:
        before = self.state
        self.state, instructions = transitions.step(before, event, self._loop.time())
        if self.state.phase is not before.phase:
            self._phase_changed(before.phase)
        if self.state.deadline != before.deadline:
            self._arm_timer()
        for instruction in instructions:
            self._carry_out(instruction)

    def _carry_out(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.SpawnRanks():
                self._spawn_ranks()
            case events.SetPeers(addresses):
                self._set_peers(addresses)
            case events.RegroupEngine():
                self._run(self._regroup_engine())
            case events.Abort(reason):
                if self.engine is not None:
                    self.engine.abort(reason)
            case events.SignalRanks(pids, signum):
                for pid in pids:
                    signal_group(pid, signum)
            case events.CloseEngine():
                self._run(self._close())
            case events.Report():
                self._on_report(self.job_id)

    def _set_peers(self, addresses: tuple[str, ...]) -> None:
        if self.engine is None:
            return
        try:
            self.engine.set_peers(list(addresses))
        except (RuntimeError, ValueError) as error:
            self.post(events.EngineFailed(f"node {self._node.node_id}: the other hosts can't be reached: {error}"))

    async def _regroup_engine(self) -> None:
        """The newest generation is enough: others may have been decided while an older one was being formed."""
        async with self._regrouping:
            engine, spec = self.engine, self.spec
            if engine is None or spec.generation <= self._engine_generation:
                return
            hosts = [list(host.ranks) for host in spec.hosts]
            members = [member for host in spec.hosts for member in host.members]
            try:
                await in_thread(
                    lambda: engine.regroup(
                        generation=spec.generation, host_index=spec.host_index, hosts=hosts, members=members
                    )
                )
            except (RuntimeError, ValueError) as error:
                self.post(events.EngineFailed(f"node {self._node.node_id} can't regroup: {error}"))
                return
            self._engine_generation = spec.generation
            if self.spec is spec and self.state.peers:
                self._set_peers(self.state.peers)

    def _phase_changed(self, before: Phase) -> None:
        now = self.state.phase
        self._log.info("job phase", phase=now.value, before=before.value, failure=self.state.failure or None)
        if before is Phase.PREPARING:
            self._prepared.set()
        if now is Phase.RUNNING:
            self._run(self._watch_waits())
        if now is Phase.STOPPED:
            self._run(self._finish())

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state.deadline is not None:
            self._timer = self._loop.call_at(self.state.deadline, self.post, events.TimerFired())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("internal error", exc_info=error)
            self.post(events.EngineFailed(f"node {self._node.node_id}: internal error: {error!r}"))

    # ── beginning ──

    async def _prepare(self) -> None:
        try:
            await self._check_and_make_engine()
        except Exception as error:  # whatever it is, the job can't run here, and its user must learn why
            self._log.error("the job can't be prepared", error=str(error), exc_info=not isinstance(error, _EXPECTED))
            words = disk_words(error) if isinstance(error, OSError) and error.filename else str(error) or repr(error)
            self.post(events.PrepareFailed(f"node {self._node.node_id}: {words}"))
        else:
            assert self.engine is not None
            self.post(events.EngineReady(self.engine.address()))

    async def _check_and_make_engine(self) -> None:
        if not self.spec.adopt:
            await in_thread(lambda: launch.check_program(self.spec.program, self._node.environment))
            self._secrets = await in_thread(lambda: launch.read_secrets(self.spec.program, self._node.node_id))
            self._plugin = await wanted_plugin(self.spec, self._node.environment)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        await self._save()  # before anything is started: the next life must find it
        self._core = await self._node.core.load()
        self.engine = await make_engine(
            self._core,
            self.spec,
            data_socket=self.data_socket,
            data_host=self._node.data_host,
            wire=self._node.wire,
            tokens=self.tokens,
        )
        self._loop.add_reader(self.engine.event_fd(), self._take_engine_events)

    def _spawn_ranks(self) -> None:
        for rank in self.spec.ranks:
            try:
                pid = self._spawn(rank)
            except OSError as error:
                command = launch.command(self.spec.program)
                words = disk_words(error) if error.errno in FULL else error
                text = f"node {self._node.node_id}: rank {rank} can't be started ({command[0]}): {words}"
                self.post(events.SpawnFailed(rank, text))
                break
            self.post(events.RankStarted(rank, pid))
        self._secrets.clear()
        self._run(self._save())

    def _spawn(self, rank: int) -> int:
        output = RankOutput(LogFile(log_path(self._folder, rank), self._node.log_limits), self._log.warning)
        self._outputs[rank] = output
        stdout, stderr = output.open()
        try:
            pid: int = self._core.spawn(
                launch.command(self.spec.program),
                launch.environment(
                    self.spec,
                    rank,
                    base=self._node.environment,
                    secrets=self._secrets,
                    rank_socket=self._node.rank_socket,
                    cache=self._node.cache,
                    plugin=self._plugin,
                ),
                str(launch.work_folder(self.spec.program)),
                stdout,
                stderr,
            )
        finally:
            os.close(stdout)
            os.close(stderr)
        self._watches[rank] = self._node.reaper.watch_child(pid, lambda code: self._rank_exited(rank, code))
        self._start_times[rank] = start_time(pid)
        self._memory[rank] = MemoryWatch(pid)
        return pid

    # ── outcomes ──

    def _rank_exited(self, rank: int, code: int | None) -> None:
        self._take_engine_events()  # whether the job had failed before
        self._node.lease_over()  # the keeper may have ended the rank: then that is told, not its SIGKILL
        output = self._outputs[rank]
        output.drain()
        code = 0 if code is None else code
        tail = output.error_tail() if code else ""
        if code == -signal.SIGKILL and self.state.phase is Phase.RUNNING:  # not ours
            tail = "\n".join(filter(None, (tail, self._memory[rank].explain())))
        self._log.info("rank exited", rank=rank, exit_code=code)
        self.post(events.RankExited(rank, code, max(0, -code), tail, time.time()))
        self._run(self._save())

    def _adopted_process_ended(self, rank: int) -> None:
        """The process of an adopted rank is gone; a farewell may still wait in the core's events and comes first."""
        self._take_engine_events()
        self._lost(rank, "its process has ended")

    def _lost(self, rank: int, words: str, after_error: bool = False) -> None:
        """How the process of an adopted rank ended is its parent's to know; what it died of may be known here."""
        memory = self._memory.get(rank)
        if memory is not None and memory.killed:
            words = f"{words}. {memory.explain()}"
        self.post(events.RankLost(rank, words, time.time(), after_error))

    def _take_engine_events(self) -> None:
        if self.engine is None:
            return
        happened = self.engine.events()
        after_error: set[int] = set()  # ranks that were lost when the engine had failed already
        for event in happened:
            if event["kind"] == "error":
                self._engine_failed = True
            elif event["kind"] == "lost" and self._engine_failed:
                after_error.add(int(event["rank"]))
        for event in sorted(happened, key=lambda event: event["kind"] == "error"):  # who is lost may explain an error
            rank, text = int(event["rank"]), str(event["text"])
            match event["kind"]:
                case "joined":
                    self.post(events.RankConnected(rank))
                    if self.spec.adopt and (watch := self._watches.pop(rank, None)):
                        watch.close()  # from now on the core's connection tells
                case "left":
                    self.post(events.RankLeft(rank, time.time()))
                case "lost":
                    self._lost(rank, text or "its connection broke", rank in after_error)
                case "error":
                    self.post(events.EngineFailed(text))
                case "suspended":
                    self.post(events.Suspended(int(event["generation"]), int(event["host"]), text))
                case "ring":
                    self._log.info("order of the hosts in rings", order=text)

    async def _watch_waits(self) -> None:
        while self.state.phase is Phase.RUNNING and self.engine is not None:
            await asyncio.sleep(WAITS_EVERY_S)
            if self.state.phase is Phase.RUNNING:
                self.post(events.WaitsChanged(self.engine.waiting(WAITS_LONGER_THAN_S)))

    # ── end ──

    async def _close(self) -> None:
        try:
            await self._kill_leftovers()
            for output in self._outputs.values():
                output.close()
            await self._close_engine()
        finally:
            self.post(events.EngineClosed())

    async def _kill_leftovers(self) -> None:
        if self.spec.adopt:
            return
        everybody = (*self.state.ranks, *self.state.gone)
        leaders = {rank.pid: self._start_times[rank.member] for rank in everybody if rank.pid}
        left = await kill_members(leaders, marks_of(self.job_id, self._node.rank_socket), LEFTOVER_KILL_S)
        if left:
            self._log.error("processes do not die", pids=left)

    async def _close_engine(self) -> None:
        async with self._regrouping:
            engine, self.engine = self.engine, None
        if engine is not None:
            self._loop.remove_reader(engine.event_fd())
            await in_thread(engine.close)
            remove_sockets(self.data_socket.parent, self.data_socket.stem)

    async def _finish(self) -> None:
        for watch in self._watches.values():
            watch.close()
        await self._save()
        self._finished.set()

    # ── records ──

    @property
    def _folder(self) -> Path:
        return self._node.jobs_folder / self.job_id

    async def _save(self) -> None:
        """Writes the journal as things are when the disk is free; several calls that wait for it make one write. A
        full disk must not end a job that runs, nor keep its end from being told: it is tried again until it is done."""
        self._saves_wanted += 1
        wanted = self._saves_wanted
        async with self._save_lock:
            if self._saves_done >= wanted:
                return
            self._saves_done = self._saves_wanted
            entry, owed = self._entry(), self._node.journal.owes(self.job_id)
            try:
                await in_thread(lambda: self._node.journal.write(entry))
            except OSError as error:
                if not owed:
                    self._log.warning("the journal can't be written; it is tried again", error=disk_words(error))
                    self._run(self._save_again())

    async def _save_again(self) -> None:
        while self._node.journal.owes(self.job_id):
            await asyncio.sleep(SAVE_AGAIN_S)
            with contextlib.suppress(OSError):
                await in_thread(lambda: self._node.journal.write_owed(self.job_id))
        self._log.info("the journal is written again")

    def _entry(self) -> JobEntry:
        ranks = tuple(
            RankEntry(
                rank=rank.rank,
                local_rank=local,
                member=rank.member,
                pid=rank.pid,
                start_time=self._start_times.get(rank.member, 0),
                exited=rank.phase is RankPhase.EXITED,
                exit_code=rank.exit_code,
                signal=rank.signal,
                error_tail=rank.error_tail,
                exited_at=rank.exited_at,
                follows=rank.follows,
            )
            for local, rank in enumerate((*self.state.ranks, *self.state.gone))
        )
        return JobEntry(
            job_id=self.job_id,
            generation=self.generation,
            adopt=self.spec.adopt,
            rank_socket=str(self._node.rank_socket),
            ranks=ranks,
            ended=self.stopped,
            error=self.state.error,
        )

    def _rank_status(self, rank: state.Rank, with_tail: bool) -> common_pb2.RankStatus:
        return common_pb2.RankStatus(
            rank=rank.rank,
            local_rank=self.spec.ranks.index(rank.rank),
            node_id=self._node.node_id,
            state=_RANK_STATES[rank.phase],
            pid=rank.pid,
            exit_code=rank.exit_code,
            signal=rank.signal,
            error_tail=rank.error_tail if with_tail else "",
            log_path=str(log_path(self._folder, rank.member)) if rank.member in self._outputs else "",
            exited_at=rank.exited_at,
            follows=rank.follows,
            member=rank.member,
            left=self.spec.elastic and (rank.left or rank.lost),
        )
