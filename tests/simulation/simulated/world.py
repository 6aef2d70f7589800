"""A cluster that things happen to, and the promises that must hold whatever happens."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, replace

from bagua.base.errors import ServiceError
from bagua.daemon.coordinator.rounds import requests
from bagua.daemon.coordinator.rules.domain import JobRecord, JobState, Phase
from bagua.daemon.coordinator.rules.evidence import ending
from bagua.daemon.coordinator.rules.membership import next_generation
from bagua.daemon.coordinator.rules.placement import place
from bagua.daemon.coordinator.rules.translate import checked_spec
from bagua.proto import common_pb2
from simulated.coordinator import OPTIONS, OWNER, Life
from simulated.daemon import PATIENCE_S, STOPPED, SimulatedDaemon
from simulated.network import Stream
from simulated.training import Training

GRACE_S = 2.0
# Everything must have come to rest so long after the last trouble: whatever waits, waits for one of these.
REST_S = OPTIONS.start_s + OPTIONS.gone_s(max(PATIENCE_S)) + OPTIONS.stop_margin_s + 4 * GRACE_S + 20.0


@dataclass(frozen=True)
class Elastic:
    """The part of a specification that tells how a job grows and shrinks."""

    least: int
    most: int
    respawn: int
    takes: bool

    @classmethod
    def drawn(cls, rng, nodes, most):
        return cls(rng.choice((0, 0, nodes)), rng.choice((nodes, most)), rng.choice((0, 3)), rng.random() < 0.8)


@functools.cache
def spec_of(nnodes, nproc, elastic):
    spec = common_pb2.JobSpec(
        name="sim",
        entry="sim.py",
        nnodes=nnodes,
        nproc_per_node=nproc,
        placement_timeout_s=10_000.0,
        stop_grace_s=GRACE_S,
        elastic=elastic is not None,
    )
    if elastic is not None:
        spec.min_nodes, spec.max_nodes, spec.respawn = elastic.least, elastic.most, elastic.respawn
        spec.args.extend(["takes"] if elastic.takes else [])
    return checked_spec(spec)


class BrokenPromiseError(AssertionError):
    """A promise does not hold; says which."""


class World:
    """``make_store(on_commit)`` gives the database."""

    def __init__(self, rng, trouble, make_store, nodes, slots, make_life=Life):
        self.rng = rng
        self.trouble = trouble
        self.store = make_store(self._committed)
        self.life = None
        self.replacing = []
        self._make_life = make_life
        self._folder = asyncio.Lock()  # of the state: one coordinator uses it
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._unexpected)
        self.broken = []
        self.calls = set()
        self.submitted = []
        self.acknowledged = []  # jobs that their callers know of
        self.cancelled = set()  # and those that are to end, as somebody was told
        self._seen_ended = set()
        self._generations = {}  # elastic job -> the last one stored, its members
        self.daemons = []
        self.training = Training(rng, self.daemons, self.broken)
        self.daemons += [SimulatedDaemon(f"n{number}", slots, rng, self._connect, self) for number in range(nodes)]

    # ---- what happens

    async def start_coordinator(self):
        """A new life, on the same database, when the former one is over; a supervisor does not give up."""
        while self.life is None:
            async with self._folder:
                if self.life is not None:
                    return
                self.life = life = self._make_life(self.store, self.trouble, self._cut_somebody_off)
                try:
                    await life.start()
                except Exception:  # of the database, or it was killed
                    if self.life is life:
                        self.life = None
            await asyncio.sleep(0.5)

    async def end_coordinator(self, gently):
        life, self.life = self.life, None
        if life is None:
            return
        if not gently:
            life.worker.killed = True
        async with self._folder:
            await (life.stop() if gently else life.kill())

    def submit(self, nnodes, nproc, elastic=None):
        """Somebody submits a job; its answer comes later."""
        life = self.life
        if life is None or not life.listens:
            return
        job_id = f"job-{len(self.submitted)}"
        self.submitted.append(job_id)
        job = JobRecord(
            job_id,
            spec_of(nnodes, nproc, elastic),
            created_at=self._loop.time(),
            reason="submitted",
            submitted_clock=life.clock.now(),
            master_port=20_000,
            job_key=bytes(32),
        )

        async def call():
            await life.intake.submit(job, "")
            self.acknowledged.append(job_id)
            self._must(self._stored([job_id]), f"{job_id} was acknowledged and is not stored")

        self._call(call())

    def suspend_others(self, job_id, node_id, entered, lost=""):
        """The engines of a job hear from each other, soon."""
        for daemon in self.daemons:
            if daemon.node_id != node_id:
                seconds = self.rng.choice((0.0, 0.05, 1.0)) * self.rng.random()
                words = f"{lost or node_id} has lost somebody"
                self._loop.call_later(seconds, daemon.suspend, job_id, entered, words, lost)

    def part_died(self, job_id, node_id, part):
        if part.fact.entered:
            self.suspend_others(job_id, node_id, part.fact.entered, lost=node_id)

    def ask(self, wish):
        life = self.life
        if life is not None and life.listens and self.acknowledged:
            self._call(life.intake.request(self.rng.choice(self.acknowledged), wish))

    def drain(self, node_id, draining):
        life = self.life
        if life is not None and life.listens and node_id in life.board.views:
            self._call(life.intake.drain(node_id, draining))

    def cancel(self, job_id):
        life = self.life
        if life is None or not life.listens:
            return

        async def call():
            await life.intake.request(job_id, lambda job: requests.cancel(job, "cancelled"))
            self.cancelled.add(job_id)

        self._call(call())

    def _call(self, work):
        async def quietly():
            try:
                await work
            except (ServiceError, OSError):
                pass
            except Exception as error:
                if "database is locked" not in str(error):
                    raise

        task = self._loop.create_task(quietly())
        self.calls.add(task)
        task.add_done_callback(self._called)

    def _called(self, task):
        self.calls.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.broken.append(f"a call failed: {task.exception()!r}")

    def _connect(self, daemon):
        if self.life is None or not self.life.listens:
            return None
        stream = Stream(daemon.link)
        self.life.accept(stream)
        return stream

    def _cut_somebody_off(self):
        """A task that waits for the database may be cancelled: a stream, a caller, or the coordinator by its death."""
        life = self.life
        if self.trouble.over or life is None:
            return
        tasks = [*life.streams, *self.calls]
        chosen = self.rng.randrange(len(tasks) + 1)
        if chosen < len(tasks):
            tasks[chosen].cancel()
        else:
            self.replace(gently=False, seconds=self.rng.uniform(0.0, 5.0))

    def replace(self, gently, seconds):
        """The coordinator ends, and another one comes up after a while."""

        async def replaced():
            await self.end_coordinator(gently)
            await asyncio.sleep(0.0 if self.trouble.over else seconds)
            await self.start_coordinator()

        self.replacing.append(self._loop.create_task(replaced()))

    def _stored(self, job_ids):
        with self.store.read() as tx:
            return {stored.job.job_id: stored for stored in tx.stored(job_ids)}

    def _unexpected(self, loop, context):
        self.broken.append(f"{context['message']}: {context.get('exception')!r}")

    def _must(self, holds, text):
        if not holds:
            self.broken.append(text)

    # ---- promises that hold at every moment

    def _committed(self):
        left = [job_id for job_id in self.submitted if job_id not in self._seen_ended]
        for job_id, stored in self._stored(left).items():
            if stored.job.spec.elastic:
                self._check_generation(stored.job)
            if stored.job.state.terminal:
                self._seen_ended.add(job_id)
                self._ended(stored.job)

    def _check_generation(self, job):
        """Nobody comes back, and nobody changes his number."""
        generation, before = self._generations.get(job.job_id, (0, set()))
        members = {rank.number for rank in job.ranks}
        lobby = {rank.number for part in job.joining for rank in part.ranks}
        gone = {rank.number for host in job.former for rank in host.ranks}
        self._generations[job.job_id] = job.generation, members | lobby
        self._must(job.generation >= generation, f"{job.job_id} went back to generation {job.generation}")
        if generation:
            self._must(
                members <= before or job.generation - generation > 1,
                f"generation {job.generation} of {job.job_id} has members from nowhere",
            )
            kept = before <= members | lobby | gone
            self._must(kept, f"{job.job_id} lost a member in silence")
            self._must(not members & (gone | lobby), f"members of {job.job_id} are gone and there")
            everybody = set(range(job.next_member))
            self._must(members | gone | lobby == everybody, f"members of {job.job_id} are forgotten")
            waits = job.state is JobState.WAITING
            self._must(waits is (job.plan.holds and job.state.under_way), f"{job.job_id} waits, or holds")

    def _ended(self, job):
        with self.store.read() as tx:
            said = tx.events(job.job_id, 0, 1_000)[-1].reason
        for daemon in self.daemons:
            part = daemon.parts.get(job.job_id)
            if part is not None and part.computing and "not stopped within" not in said:
                self.broken.append(f"{job.job_id} is {job.state.name}, and {daemon.node_id} computes it still")
        if job.state is JobState.SUCCEEDED:
            well = {
                d.node_id
                for d in self.daemons
                for job_id, part in d.history
                if job_id == job.job_id and part.ended_well
            }
            had_state = {host.node_id for host in job.hosts if not host.new}
            self._must(well >= had_state, f"{job.job_id} SUCCEEDED falsely")

    # ---- promises that hold when all has come to rest

    async def rest(self, check, what):
        """Returns when ``check`` finds nothing. Raises BrokenPromiseError with what it finds after REST_S."""
        until = self._loop.time() + REST_S
        while True:
            if self.broken:
                raise BrokenPromiseError("; ".join(self.broken))
            found = check()
            if not found:
                return
            if self._loop.time() > until:
                raise BrokenPromiseError(f"{what}: {'; '.join(found)}")
            await asyncio.sleep(1.0)

    async def heal(self, dead):
        """No more trouble; the daemons of ``dead`` are gone for good."""
        self.trouble.over = True
        self.training.clumsy = 0.0
        for daemon in self.daemons:
            daemon.link.silent_until = min(daemon.link.silent_until, self._loop.time())
            daemon.frozen_until = min(daemon.frozen_until, self._loop.time())
            if daemon.node_id in dead:
                if daemon.alive:
                    daemon.kill()
            else:
                daemon.restart()
        while self.replacing:
            await self.replacing.pop()
        await self.start_coordinator()

    def at_rest(self):
        """Violations of the promises after a long quiet time."""
        life = self.life
        if life is None or not life.listens:
            return ["the coordinator is away"]
        found = [f"{len(self.calls)} calls have no answer"] if self.calls else []
        if life.intake.inbox or life.worker.waiting:
            found.append("something is not written")
        stored_jobs = self._stored(self.submitted)
        with self.store.read() as tx:
            live, nodes = tx.live(), {node.node_id: node for node in tx.nodes()}
        if live.keys() != life.board.jobs.keys():
            found.append("the board has other jobs than the database")
        for job_id, stored in life.board.jobs.items():
            if stored_jobs.get(job_id) != stored:
                found.append(f"the board has another {job_id} than the database")
        for daemon in self.daemons:
            found += self._node(life, daemon, nodes.get(daemon.node_id), stored_jobs)
        for job_id, stored in stored_jobs.items():
            found += self._job(life, stored.job)
            if job_id in self.cancelled and not stored.job.state.terminal:
                found.append(f"{job_id} was cancelled and is {stored.job.state.name}")
        return found

    def _node(self, life, daemon, record, jobs):
        name = daemon.node_id
        view = life.board.views.get(name)
        seen = (
            daemon.connected,
            life.sessions.get(name) is not None,
            view is not None and view.connected,
            record is not None and record.owner == OWNER,
        )
        found = []
        if set(seen) != {daemon.alive}:
            found.append(f"{name}: (it, session, board, database) say connected {seen}, it lives: {daemon.alive}")
        if not daemon.alive or view is None:
            return found
        held = sum(daemon.slots_of(part) for part in daemon.parts.values() if part.fact.phase != STOPPED)
        if view.used != held:
            found.append(f"{name}: {view.used} slots are taken, {held} are held")
        for job_id, part in daemon.parts.items():
            stored = jobs.get(job_id)
            job = None if stored is None else stored.job
            mine = None if job is None else (job.host_index(name) is not None or job.other_parts(name))
            if part.computing and (job is None or not job.state.under_way or not mine):
                found.append(f"{name} computes {job_id}, which is {job and job.state.name}")
            if job is not None and not job.state.terminal and (index := job.host_index(name)) is not None:
                host = job.hosts[index]
                mine = [rank for rank in part.fact.ranks if rank.member in part.present or not part.elastic]
                told = (part.fact.phase, [(rank.state, rank.exit_code) for rank in mine])
                if told != (host.phase.value, [(rank.state.value, rank.exit_code) for rank in host.ranks]):
                    found.append(f"{name} said {told} of {job_id}, known is {host}")
        return found

    def _job(self, life, job):
        name = f"{job.job_id} is {job.state.name}"
        if job.state is JobState.PENDING:
            free = [view for name, view in life.board.views.items() if name not in life.board.kept[1]]
            fits = not isinstance(place(job.spec, free), str)
            return [f"{name} though there is room"] if fits else []
        if job.state in (JobState.STARTING, JobState.STOPPING):
            return [f"{name} ({job.reason})"]
        found = []
        if job.state is JobState.RUNNING and any(host.suspended for host in job.hosts):
            found.append(f"{name} and suspended")
        if job.spec.elastic and job.state.under_way:
            found += self._elastic(life, job)
        for host in job.hosts:
            daemon = next(daemon for daemon in self.daemons if daemon.node_id == host.node_id)
            part = daemon.parts.get(job.job_id)
            same = daemon.alive and daemon.boot_id == host.boot_id and part is not None
            over = host.phase is Phase.STOPPED  # its ranks have ended well, those of others run on
            if job.state is JobState.RUNNING and not over and not (same and part is not None and part.computing):
                found.append(f"{name}, but not on {host.node_id}")
            if job.state is JobState.RUNNING and part is not None and part.fact.suspended:
                found.append(f"{name}, but suspended on {host.node_id}")
            if job.state is JobState.RUNNING and job.spec.elastic and part is not None and not over:
                if part.fact.entered != job.generation or any(
                    rank.newcomer and rank.member in part.present for rank in part.fact.ranks
                ):
                    found.append(f"{name}: {host.node_id} is in {part.fact.entered}, {part.fact.ranks}")
            if job.state is JobState.RUNNING and part is not None and part.fact.generation != job.generation:
                found.append(f"{name} in generation {job.generation}, {host.node_id} in {part.fact.generation}")
            if job.state.terminal and same and host.phase is not Phase.STOPPED:
                found.append(f"{name}, but {host.node_id} has not stopped it for the coordinator")
        return found

    def _elastic(self, life, job):
        """Nothing is left to be done, and a wait has a reason."""
        name = f"{job.job_id} is {job.state.name} ({job.reason})"
        stay = job.state is JobState.WAITING and all(part.ready for part in job.joining)  # they are too few
        found = [f"{name}, and {job.joining} are joining"] if job.joining and not stay else []
        views = {
            node_id: replace(view, heard_clock=life.sessions.heard(node_id) or view.heard_clock)
            for node_id, view in life.board.views.items()
        }
        step, _ = next_generation(job, views, life.clock.now(), OPTIONS)
        if step is not None:
            found.append(f"{name}, and {step} is to be done")
        if job.state is JobState.WAITING and not job.paused and len(job.hosts) >= job.least:
            found.append(f"{name} without a reason")
        if job.state is JobState.RUNNING and (job.paused or len(job.hosts) < job.least) and not ending(job):
            found.append(f"{name}, but should wait")
        return found

    def all_over(self):
        found = self.at_rest()
        found += [
            f"{job_id} is {stored.job.state.name}"
            for job_id, stored in self._stored(self.submitted).items()
            if not stored.job.state.terminal
        ]
        if self.life is not None:
            alive = {daemon.node_id for daemon in self.daemons if daemon.alive}
            found += [
                f"{view.used} slots of {name} are held by nobody"
                for name, view in self.life.board.views.items()
                if view.used and name in alive
            ]
        return found
