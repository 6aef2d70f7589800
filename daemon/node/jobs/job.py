"""Runs one job on this node: carries out the state machine's instructions and posts their outcomes as events."""

from __future__ import annotations

import asyncio
import base64
import math
import secrets
import signal
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bagua.base import islands
from bagua.base.disk import FULL, disk_words
from bagua.base.end_reasons import late_words
from bagua.base.errors import BaguaError
from bagua.base.machine_clock import boottime
from bagua.base.system_limits import limit_words
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.daemon.node.jobs.context import NodeContext
from bagua.daemon.node.jobs.job_engine import JobEngine
from bagua.daemon.node.jobs.job_record import JobRecord, journal_entry, local_job
from bagua.daemon.node.jobs.journal import JobEntry
from bagua.daemon.node.jobs.rank_processes import RankProcesses
from bagua.daemon.node.jobs.spans import NodeSpans
from bagua.daemon.node.logs.file import LogFile, log_path
from bagua.daemon.node.logs.output import error_reason, is_crash
from bagua.daemon.node.processes.process import signal_group
from bagua.daemon.node.ranks import launch, stopped_ranks
from bagua.daemon.node.rules import events, state, transitions
from bagua.daemon.node.rules.job_specification import JobSpecification
from bagua.daemon.node.rules.membership import LEAVE_S, ended_here
from bagua.daemon.node.rules.state import Phase, RankPhase
from bagua.proto import common_pb2, node_pb2

WAITS_EVERY_S = 5.0
WAITS_LONGER_THAN_S = 10.0
CONTINUE_AGAIN_S = 1.0

_EXPECTED = (launch.LaunchError, BaguaError, OSError, RuntimeError)


class Job:
    """Job on this node: one generation, or, if it is elastic, one after the other. Everything happens in the event
    loop; blocking calls run in threads of their own. Whatever belongs to a process is kept by its member number.

    ``on_report`` is called whenever what the coordinator should know has changed.
    """

    def __init__(self, spec: JobSpecification, node: NodeContext, on_report: Callable[[str], None]) -> None:
        self.spec = spec
        self.state = state.new_job(
            node.node_id,
            spec.ranks,
            spec.members,
            joining=spec.joining,
            adopt=spec.adopt,
            grace_s=spec.stop_grace_s,
            join_s=spec.join_timeout_s,
            elastic=spec.elastic,
            island_size=islands.size_in(spec.program.env) if spec.elastic else 1,
            generation=spec.generation,
        )
        self.tokens: dict[int, bytes] = {}
        self._make_tokens()
        self._spans = NodeSpans(spec.job_id, node.node_id, spec.program.env) if node.send_span is not None else None
        self._node = node
        self._on_report = on_report
        self._log = node.log.bind(job=spec.job_id, generation=spec.generation)
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.Lock()
        self._queue: deque[events.Event] = deque()
        self._stepping = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.prepared = asyncio.Event()  # the engine listens, or the job has failed or was stopped before
        self.finished = asyncio.Event()  # nothing of the job is left on this node, and the journal says so
        self._cleared = asyncio.Event()
        self._beginnings: set[asyncio.Task[None]] = set()  # fetch code, make the engine, start ranks
        self._closing: asyncio.Task[None] | None = None
        self._joined: dict[int, int] = {}  # member -> pid that got the way to the engine
        self._late: dict[int, str] = {}  # members that were ended for it, and why
        self._patience_s = 0.0  # see LocalJob
        self._fence_at = math.inf
        self.held = False  # its ranks do nothing until the coordinator has answered
        self.engine = JobEngine(spec, node, self._log, self._on_engine_event)
        self._processes = RankProcesses(spec.job_id, node, self._log, self._rank_exited)
        self._record = JobRecord(spec.job_id, node.journal, self._journal_entry, self._log)

    # ── for the daemon ──

    @property
    def job_id(self) -> str:
        return self.spec.job_id

    @property
    def generation(self) -> int:
        return self.spec.generation

    @property
    def deserted(self) -> bool:
        """True if newcomers were to join from here, and all of them have ended."""
        return not self.state.ranks and all(rank.phase is RankPhase.EXITED for rank in self.state.present)

    @property
    def numbers(self) -> set[int]:
        """Members that this node has, or has had."""
        return {rank.member for rank in self.state.everybody}

    def knows(self, member: int) -> bool:
        """True if a process here has, or had, this number."""
        return member in self.tokens

    def holds(self, member: int) -> bool:
        """True if the number is that of a process which is here, or will be."""
        return any(rank.member == member for rank in self.state.present)

    @property
    def stopped(self) -> bool:
        return self.state.phase is Phase.STOPPED

    @property
    def busy(self) -> bool:
        """True while something happens here that does not need the coordinator."""
        preparing_or_ending = (Phase.PREPARING, Phase.TERMINATING, Phase.KILLING, Phase.CLOSING)
        return bool(self.state.alive) or self.state.phase in preparing_or_ending

    @property
    def joined(self) -> bool:
        """True if a rank has joined, where others start them."""
        return any(rank.phase is not RankPhase.WAITING for rank in self.state.ranks)

    @property
    def ending(self) -> bool:
        """True once the job is being ended here: nobody can join it any more."""
        return self.state.phase not in (Phase.PREPARING, Phase.RUNNING)

    def follow(self, spec: JobSpecification, peers: tuple[str, ...]) -> None:
        """Follows the coordinator, which has decided the next generation of an elastic job, or who is to join it.
        Nothing of it is stopped that stays in.
        """
        unknown = set(spec.members) - {rank.member for rank in self.state.present}
        if unknown:
            text = f"node {self._node.node_id} has no members {sorted(unknown)}"
            self.post(events.EngineFailed(f"{text}, which generation {spec.generation} of the job needs here"))
            return
        if spec.generation > self.spec.generation:
            self._log = self._node.log.bind(job=spec.job_id, generation=spec.generation)
            self._log.info("job goes on", ranks=list(spec.ranks), members=list(spec.members), planned=spec.planned)
        if spec.patience_s != self.spec.patience_s:
            self._log.info("a silent host of the job has longer: its steps take long", eight_steps_s=spec.patience_s)
        self.spec = spec
        self._make_tokens()
        self.post(
            events.Regrouped(
                spec.generation, spec.ranks, spec.members, peers, spec.joining, planned=spec.planned, hold=spec.hold
            )
        )
        self._run(self._record.save())

    def _make_tokens(self) -> None:
        for member in (*self.spec.members, *self.spec.joining):
            self.tokens.setdefault(member, secrets.token_bytes(32))  # those that run keep theirs

    async def resume(self, note: Mapping[str, Any], before: Mapping[int, common_pb2.RankStatus]) -> None:
        """Goes on with the ranks of an earlier life of the daemon, which wait for the next generation, and with those
        that come to their end. ``note``: see ``note``; ``before``: what the journal knows of them. Raises whatever an
        engine can raise."""
        self.tokens = {int(member): bytes.fromhex(token) for member, token in note["tokens"].items()}
        found = self._processes.find()
        beside = state.Beside(note["fresh"], note["lobby"], note["leaving"], note["takes_newcomers"])
        self.state = state.resumed(
            self.state,
            found,
            before,
            beside,
            self._loop.time() + LEAVE_S,
            replaced=self._node.keeper.replaced,
        )
        self.engine = JobEngine(self.spec, self._node, self._log, self._on_engine_event, born=note["born"])
        address = ""
        await self._processes.choose_user(self.spec)
        if self.spec.members:  # else all that is left here was dismissed, and has left the engine
            address = await self._make_engine()
        self.post(events.EngineReady(address))
        self._processes.watch_found(found)
        for member in found.keys() - {*self.spec.members, *beside.leaving}:  # their engine is gone
            signal_group(found[member], signal.SIGKILL)
        self._log.warning("ranks go on with a daemon that was started again", members=sorted(found))

    def note(self) -> dict[str, Any]:
        """Returns all that the next life of the daemon needs to know of the generation that the engine is in."""
        return {
            "wire_version": WIRE_VERSION,
            "run": base64.b64encode(self.engine.present.wire).decode(),
            "tokens": {member: token.hex() for member, token in self.tokens.items()},
            "born": self.engine.born,
            "fresh": [rank.member for rank in self.state.ranks if rank.newcomer],
            "lobby": [rank.member for rank in self.state.lobby],
            "leaving": [rank.member for rank in self.state.leaving if rank.member not in self.engine.present.members],
            "takes_newcomers": self.state.takes_newcomers,
        }

    @property
    def outlives_daemon(self) -> bool:
        """True if its ranks go on with the next life of the daemon; newcomers are started again instead."""
        return self.spec.elastic and not self.spec.adopt

    def _save_note(self) -> None:
        """Tells the keeper what ranks may rely on."""
        if self.outlives_daemon and self.state.entered and not self.ending:
            self._node.keeper.note(self.job_id, self.note())

    def set_fence(self, at: float, held: bool) -> None:
        """Lets ranks go on until that time of ``boottime``; ``held``: they are to do nothing, whatever the time. Those
        that others started are not touched."""
        if self.spec.adopt:
            self.held = held
            return
        stopped = self.held or self._fence_at <= boottime()  # by themselves, if nobody else could
        self.held, self._fence_at = held, at
        self.engine.set_fence(at)
        if held or stopped:
            self._signal_ranks(signal.SIGSTOP if held else signal.SIGCONT)
        if stopped and not held:  # a rank that was about to stop itself when it was held does so now
            self._loop.call_later(CONTINUE_AGAIN_S, self._continue_again)

    def _continue_again(self) -> None:
        if not self.held:
            self._signal_ranks(signal.SIGCONT)

    def _signal_ranks(self, number: int) -> None:
        for rank in self.state.alive:
            if rank.pid:
                signal_group(rank.pid, number)

    def start(self) -> None:
        self._log.info(
            "job begins", ranks=list(self.spec.ranks), adopt=self.spec.adopt, joining=list(self.spec.joining) or None
        )
        self._begin(self._prepare())

    def post(self, event: events.Event) -> None:
        """Hands an event to the state machine and does what it says."""
        self._queue.append(event)
        if self._stepping:  # a step posts events, too: they wait for their turn
            return
        self._stepping = True
        try:
            while self._queue:
                self._step(self._queue.popleft())
        finally:
            self._stepping = False

    @property
    def cleared(self) -> bool:
        """True once another generation may begin here. If the job was stopped while it was being prepared, that work
        goes on for a while, and its end removes the job's code and kills the job's processes. So does that of
        newcomers."""
        return self._cleared.is_set()

    async def clear(self) -> None:
        """Waits until ``cleared``."""
        await self._cleared.wait()

    def log_of(self, member: int) -> LogFile | None:
        """The log of a local rank that was started."""
        return self._processes.log_of(member)

    def snapshot(self) -> node_pb2.LocalJob:
        """Returns everything that the coordinator may know of the job."""
        return local_job(self.job_id, self.state, self._log_path, self._patience_s)

    # ── for ranks ──

    def describe_waits(self) -> str:
        """Says why the job waits as a whole, and who waits for whom."""
        return "\n".join(filter(None, (self.spec.waiting, self.engine.waiting(0.0))))

    def admit(self, rank: int, pid: int) -> bool:
        """Lets the process ``pid`` be the member ``rank``. False if the rank has joined before, or has ended. A process
        that asks again before it connected gets the same answer."""
        known = self.state.find(rank)
        if known is None or known.phase is RankPhase.EXITED or known.connected or self._joined.get(rank, pid) != pid:
            return False
        self._joined[rank] = pid
        self.post(events.RankJoined(rank, pid))
        self._processes.watch(rank, pid, (lambda: self._adopted_process_ended(rank)) if self.spec.adopt else None)
        return True

    # ── the machine ──

    def _step(self, event: events.Event) -> None:
        before = self.state
        self.state, instructions = transitions.step(before, event, self._loop.time())
        self._trace(event)
        if self.state.phase is not before.phase:
            self._phase_changed(before.phase)
        if self.state.deadline != before.deadline:
            self._arm_timer()
        if isinstance(event, events.EngineReady | events.Entered | events.Regrouped | events.TakesNewcomers):
            self._save_note()
        for instruction in instructions:
            self._carry_out(instruction)

    def _trace(self, event: events.Event) -> None:
        if self._spans is not None and self._node.send_span is not None:
            for span in self._spans.follow(event, self.state):
                self._node.send_span(span)

    def trace_step(self, rank: int, step: common_pb2.SampledStep) -> None:
        """Takes a step that a rank has measured."""
        if self._spans is not None and self._node.send_span is not None:
            self._node.send_span(self._spans.step(rank, self.generation, step))

    def _carry_out(self, instruction: events.Instruction) -> None:
        match instruction:
            case events.SpawnRanks():
                waiting = tuple(rank.member for rank in self.state.present if rank.phase is RankPhase.WAITING)
                if self._open_logs(waiting):
                    self._begin(self._spawn(waiting))
            case events.StartNewcomers(members):
                self._begin(self._start_newcomers(members))
            case events.SetPeers(addresses):
                self.engine.set_peers(self.state.generation, addresses)
            case events.RegroupEngine():
                self._run(self.engine.follow(lambda: (self.spec, self.state.peers)))
            case events.Abort(reason):
                self.engine.abort(reason)
            case events.Withdraw(reason):
                self.engine.withdraw(reason)
            case events.SignalRanks(pids, signum):
                for pid in pids:
                    signal_group(pid, signum)
            case events.CloseEngine():
                self._closing = self._run(self._close())
            case events.Report():
                self._on_report(self.job_id)

    def _phase_changed(self, before: Phase) -> None:
        now = self.state.phase
        self._log.info("job phase", phase=now.value, before=before.value, failure=self.state.failure or None)
        if before is Phase.PREPARING:
            self.prepared.set()
        if now is Phase.RUNNING:
            self._run(self._watch_waits())
            if self.spec.elastic:
                self._run(self._watch_late_ranks())
        if now is Phase.STOPPED:
            self._run(self._finish())

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.state.deadline is not None:
            self._timer = self._loop.call_at(self.state.deadline, self.post, events.TimerFired())

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the event loop itself refers to tasks weakly
        task.add_done_callback(self._task_done)
        return task

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._run(work)
        self._beginnings.add(task)
        task.add_done_callback(self._beginnings.discard)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("internal error", exc_info=error)
            self.post(events.EngineFailed(f"node {self._node.node_id}: internal error: {error!r}"))

    # ── beginning ──

    async def _prepare(self) -> None:
        try:
            address = await self._check_and_make_engine()
        except Exception as error:  # whatever it is, the job can't run here, and its user must learn why
            self._log.error("the job can't be prepared", error=str(error), exc_info=not isinstance(error, _EXPECTED))
            await self._processes.leave()
            words = disk_words(error) if isinstance(error, OSError) and error.filename else str(error) or repr(error)
            self.post(events.PrepareFailed(f"node {self._node.node_id}: {words}"))
        else:
            self.post(events.EngineReady(address))

    async def _check_and_make_engine(self) -> str:
        await self._processes.choose_user(self.spec)
        if not self.spec.adopt:
            await self._processes.prepare(self.spec)
        for folder in (self._processes.folder, self._processes.logs):
            folder.mkdir(mode=0o700, exist_ok=True)
        await self._record.save()  # before anything is started: the next life must find it
        return await self._make_engine()

    async def _make_engine(self) -> str:
        words = f"node {self._node.node_id} compiles the native core, once for this machine"
        core = await self._node.core.load(lambda files: self.post(events.WaitsChanged(f"{words}: {files}")))
        self.post(events.WaitsChanged(""))
        await self._processes.serve()
        user = self._processes.user
        # A generation that was decided meanwhile is followed to once the engine is there. A lobby has none to leave.
        spec = self.engine.present if self.engine.present.members else self.spec
        return await self.engine.make(core, spec, self.tokens, user.uid if user is not None else -1)

    def _open_logs(self, members: tuple[int, ...]) -> bool:
        try:
            for member in members:
                self._processes.open_log(member)
        except OSError as error:
            self._can_not_start(members, f"a rank's log can't be made: {disk_words(error)}")
            return False
        return True

    async def _spawn(self, members: tuple[int, ...]) -> None:
        async with self._starting:
            for member in members:
                if self.ending:
                    return
                try:
                    pid = await self._processes.spawn(self.spec, member)
                except (OSError, ValueError) as error:
                    command = launch.command(self.spec.program)
                    words = disk_words(error) if isinstance(error, OSError) and error.errno in FULL else error
                    self._can_not_start((member,), f"rank {member} can't be started ({command[0]}): {words}")
                    break
                self.post(events.RankStarted(member, pid))
            self._processes.delete_secrets()
        await self._record.save()

    async def _start_newcomers(self, members: tuple[int, ...]) -> None:
        """Starts newcomers beside ranks that go on: whatever is wrong concerns these members alone."""
        try:
            await self._processes.prepare(self.spec)
            if self.ending:
                return
            await self._record.save()
            await self.engine.open_lobby({member: self.tokens[member] for member in members})
        except Exception as error:
            self._log.error("newcomers can't be started", error=str(error), exc_info=not isinstance(error, _EXPECTED))
            self._can_not_start(members, str(error) or repr(error))
        else:
            wanted = {rank.member for rank in self.state.lobby if rank.phase is RankPhase.WAITING}
            members = tuple(member for member in members if member in wanted)
            if self._open_logs(members):
                await self._spawn(members)

    def _can_not_start(self, members: tuple[int, ...], words: str) -> None:
        for member in members:
            self.post(events.SpawnFailed(member, f"node {self._node.node_id}: {words}"))

    # ── outcomes ──

    def _rank_exited(self, member: int, code: int) -> None:
        self.engine.drain_events()  # whether the job had failed before
        if (rank := self.state.find(member)) is not None and rank.phase is RankPhase.EXITED:
            return  # it was told already
        self._node.lease_over()  # the keeper may have ended the rank: then that is told, not its SIGKILL
        tail = self._processes.error_tail(member, rank.reason if rank is not None else "") if code else ""
        # Output before a death by signal says nothing of it, but for a crash's stack.
        reason = error_reason(tail) if code > 0 or is_crash(tail) else ""
        if code == -signal.SIGKILL and self.state.phase is Phase.RUNNING:
            reason = self._late.get(member) or ended_here(self.state, member) or self._processes.explain_kill(member)
            tail = "\n".join(filter(None, (tail, reason)))
        elif code == transitions.KILLED_BELOW:
            reason = f"A process below it was killed by SIGKILL. {self._processes.explain_kill(member)}"
        elif hint := limit_words(tail, code):
            reason = f"{reason.rstrip('.')}. {hint}" if reason else hint
        self._log.info("rank exited", rank=member, exit_code=code)
        self.post(events.RankExited(member, code, max(0, -code), tail, time.time(), reason))
        self._run(self._record.save())

    def _adopted_process_ended(self, rank: int) -> None:
        """The process of an adopted rank is gone; a farewell may still wait in the core's events and comes first."""
        self.engine.drain_events()
        self._on_engine_event(events.RankLost(rank, "its process has ended", time.time()))

    def _on_engine_event(self, event: events.Event) -> None:
        if isinstance(event, events.RankConnected) and self.spec.adopt:
            self._processes.unwatch(event.rank)  # from now on the core's connection tells
        if isinstance(event, events.RankLost) and (why := self._processes.memory_kill(event.rank)):
            # How the process of an adopted rank ended is its parent's to know; what it died of may be known here.
            event = replace(event, text=f"{event.text}. {why}")
        self.post(event)
        if isinstance(event, events.RankLost) and (rank := self.state.find(event.rank)) is not None and rank.pid:
            self._processes.report_death(event.rank, rank.pid)

    async def _watch_waits(self) -> None:
        while self.state.phase is Phase.RUNNING:
            await asyncio.sleep(WAITS_EVERY_S)
            if self.state.phase is Phase.RUNNING:
                self.post(events.WaitsChanged(self.engine.waiting(WAITS_LONGER_THAN_S)))

    async def _watch_late_ranks(self) -> None:
        """Ends ranks that are stopped while others would wait for them; tells for how long hosts wait for each
        other."""
        late = stopped_ranks.LateRanks()
        while self.state.phase is Phase.RUNNING:
            await asyncio.sleep(stopped_ranks.LOOK_EVERY_S)
            if (patience_s := stopped_ranks.patience(self.engine.step_s())) > self._patience_s:
                self._patience_s = patience_s
                self._on_report(self.job_id)
            pids = {rank.member: rank.pid for rank in self.state.ranks if rank.phase is RankPhase.RUNNING and rank.pid}
            stopped = [member for member, pid in pids.items() if stopped_ranks.is_stopped(pid)]
            if self.held or len(stopped) == sum(len(host.members) for host in self.spec.hosts):
                continue  # nobody waits, and nobody else has the state
            newcomers_alone = self.engine.present.host_index < 0  # they make no steps yet, and others wait for them
            limit_s = stopped_ranks.LEAST_S if newcomers_alone else stopped_ranks.longest_stop(self.engine.step_s())
            for member, seconds in late.look(self._loop.time(), stopped, limit_s).items():
                self._late[member] = late_words(seconds)
                self._log.warning("a rank is ended", member=member, why=self._late[member])
                signal_group(pids[member], signal.SIGKILL)

    # ── end ──

    async def _close(self) -> None:
        try:
            async with self._starting:  # a rank that is being started meanwhile is found, too
                if not self.spec.adopt:
                    await self._processes.kill_all()
            self._processes.close_outputs()
            await self.engine.close()
            await self._processes.leave()
        finally:
            self.post(events.EngineClosed())

    async def _finish(self) -> None:
        self._processes.close()
        await self._record.save()
        self.finished.set()
        try:
            if beginnings := [task for task in self._beginnings if not task.done()]:
                await asyncio.wait(beginnings)
            if self._closing is not None:
                await asyncio.wait([self._closing])
            await self._processes.leave()  # code that came after the end
        finally:
            self._cleared.set()

    # ── records ──

    def _log_path(self, member: int) -> Path | None:
        return log_path(self._processes.logs, member) if self.log_of(member) is not None else None

    def _journal_entry(self) -> JobEntry:
        socket, start_time = self._processes.place.rank_socket, self._processes.start_time
        return journal_entry(self.job_id, self.state, self._log_path, socket, start_time)
