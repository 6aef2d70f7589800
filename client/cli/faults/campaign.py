"""The course of ``bagua chaos``: jobs are trained one after the other, and faults are done to each until too few ranks
are left."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bagua.base.errors import ServiceError
from bagua.chaos.diary import Diaries, longest_pause, usual_step, violations, whole_epochs
from bagua.chaos.firewall import reason_against
from bagua.chaos.patience import alive, until
from bagua.chaos.plan import FENCE_AFTER_S, JOIN, KINDS, SERVICES, Fault, Need, Plan
from bagua.chaos.report import Played, by_kind
from bagua.cli.faults.cluster import ChaosCluster
from bagua.cli.faults.inject import Injector, Trained
from bagua.client import job_spec
from bagua.client.describe import ENDED, SUCCEEDED, job_state

STEPS_BETWEEN = 10  # steps of every rank before the next fault
PLACED_S = 120.0
JOINED_S = 120.0
RESPAWN = 1000
FAULTS_OF_A_JOB = 25
LAST_EVENTS = 8


class LateError(Exception):
    """A fault has lasted so long, on a slow machine, that the job had to end."""


@dataclass(frozen=True)
class Wanted:
    """Faults that are wanted: for how long, how many (0: no limit), which, and on what."""

    seconds: float
    faults: int
    seed: int
    kinds: tuple[str, ...]
    nnodes: int
    nproc_per_node: int
    workers: int
    postgresql: bool
    island_size: int = 1


@dataclass
class Findings:
    """Findings of the whole run. ``broken``: promises that were not kept, in words."""

    seconds: float = 0.0
    jobs: int = 0
    steps: int = 0
    epochs: int = 0
    played: list[Played] = field(default_factory=list)
    broken: dict[str, list[str]] = field(default_factory=dict)

    def breach(self, promise: str, words: str, at_s: float = math.inf, count: int = 1) -> None:
        """The newest fault before that moment is to blame."""
        self.broken.setdefault(promise, []).append(words)
        before = [one for one in self.played if one.at_s <= at_s]
        if before:
            before[-1].broken[promise] = before[-1].broken.get(promise, 0) + count

    def document(self) -> dict[str, object]:
        return {**asdict(self), "kinds": [asdict(row) for row in by_kind(self.played)]}


class Chaos:
    """A run. ``tell`` shows a line."""

    def __init__(self, wanted: Wanted, cluster: ChaosCluster, folder: Path, tell: Callable[[str], None]) -> None:
        self.wanted = wanted
        self.findings = Findings()
        self._cluster = cluster
        self._folder = folder
        self._tell = tell
        self._plan = Plan(wanted.seed, wanted.kinds, wanted.island_size)
        self._diaries = Diaries(folder)
        self._injector = Injector(cluster, self._goes_on, self._regrouped)
        self._jobs: list[str] = []
        self._began = time.monotonic()
        # (ranks, epoch) -> (hash, job) of the first job that came to its end:
        self._whole: dict[tuple[int, int], tuple[str, str]] = {}

    def run(self) -> Findings:
        """Plays faults until the time is over or all were played. Raises ServiceError if services can't be started."""
        self._cluster.coordinators.start()
        while not self._over():
            self._one_job()
        for job_id in self._jobs:
            self._check_end(job_id)
        self.findings.seconds = time.monotonic() - self._began
        return self.findings

    def _over(self) -> bool:
        enough = self.wanted.faults and self.faults >= self.wanted.faults
        return bool(enough) or time.monotonic() - self._began > self.wanted.seconds

    def _one_job(self) -> None:
        self._start_nodes()
        trained = self._start_job()
        try:
            for _ in range(FAULTS_OF_A_JOB):
                fault = None if self._over() else self._plan.next({n: len(p) for n, p in trained.ranks.items()})
                if fault is None:
                    break
                self._play(fault, trained)
        except LateError as error:
            self._tell(f"      {error}, which ends all ranks: another job begins")
            self._jobs.remove(trained.job_id)
            return
        except ServiceError as error:
            played = self.findings.played
            self._broke(trained, f"{played[-1].kind if played else 'before the first fault'}: {error}")
        self._end_job(trained)

    def _start_nodes(self) -> None:
        while len(self._cluster.nodes) < self.wanted.nnodes:
            self._cluster.start_node()

    def _play(self, fault: Fault, trained: Trained) -> None:
        """Raises ServiceError if the ranks that are left do not go on."""
        # The coordinator may still be coming back from the last fault.
        until(lambda: self._cluster.connected(trained.ranks), "daemons are connected to the coordinator")
        before = len(trained.pids())
        played = self._record(fault.kind)
        target, began, ended = self._injector.play(fault, trained)
        try:
            self._wait_steps(trained, time.monotonic(), f"steps after {fault.kind} ({target or 'services'})")
        except ServiceError:
            if time.monotonic() - began <= KINDS[fault.kind].harmless_s:
                raise
            self._wait_for_those_left(fault, trained, ended)
        halted = ended - began if KINDS[fault.kind].halts else 0.0
        lost = before - len(trained.pids())
        self._note(played, trained, began, halted, f"{target} ({lost} ranks)" if lost else target)
        self._injector.repair(fault, target, trained)
        if not lost:
            return
        self._start_nodes()
        if fault.alone:
            began = time.monotonic()
            played = self._record(JOIN)
            self._wait_until_whole(trained)
            self._note(played, trained, began, 0.0, f"{len(trained.pids())} ranks again")

    def _wait_for_those_left(self, fault: Fault, trained: Trained, since: float) -> None:
        """Waits after a fault that has lasted longer than is harmless. Raises LateError if that has cost all ranks: a
        node is right to end its ranks when it hears no coordinator for so long."""
        try:
            until(lambda: self._regrouped(trained, since), f"those that are left go on after a long {fault.kind}")
        except ServiceError:
            job = self._cluster.job(trained.job_id)
            fenced = any(words in job.reason for words in ("could not reach the coordinator", "has not been heard of"))
            if not (job.state in ENDED and fenced and KINDS[fault.kind].group == SERVICES):
                raise
            raise LateError(f"{fault.kind} took longer than {FENCE_AFTER_S:g} s on this machine") from None

    def _record(self, kind: str) -> Played:
        self.findings.played.append(Played(kind, "", time.monotonic() - self._began))
        return self.findings.played[-1]

    def _note(self, played: Played, trained: Trained, began: float, halted: float, target: str) -> None:
        diaries = [diary for pid, diary in self._diaries.read().items() if pid in trained.pids()]
        pause = longest_pause(diaries, began, time.monotonic()) - usual_step(diaries, began) - halted
        played.target, played.pause_s, played.ranks_left = target, max(0.0, pause), len(trained.pids())
        self._tell(f"{self.faults:4}  {played.kind} {target}: pause {played.pause_s * 1e3:.0f} ms")

    @property
    def faults(self) -> int:
        return sum(played.kind != JOIN for played in self.findings.played)

    def _wait_until_whole(self, trained: Trained) -> None:
        """Waits until ranks that were lost are replaced, and the new ones train."""
        ranks = self.wanted.nnodes * self.wanted.nproc_per_node
        began = time.monotonic()

        def whole() -> bool:
            self._look(trained)
            return len(trained.pids()) == ranks and self._goes_on(trained.pids(), began)

        until(whole, f"{ranks} ranks train again", JOINED_S)

    def _regrouped(self, trained: Trained, since: float) -> bool:
        """True if all that are members now have made some steps since then; there is at least one."""
        self._look(trained)
        return bool(trained.ranks) and self._goes_on(trained.pids(), since)

    def _look(self, trained: Trained) -> None:
        """Takes in who is a member now. Raises ServiceError if nobody is."""
        job = self._cluster.job(trained.job_id)
        if job.state in ENDED:
            raise ServiceError("The job has ended. [BG003]")
        found = self._diaries.read()
        trained.ranks.clear()
        for rank in job.ranks:
            if rank.node_id in self._cluster.nodes and rank.pid in found and found[rank.pid].steps and alive(rank.pid):
                trained.ranks.setdefault(rank.node_id, []).append(rank.pid)

    def _start_job(self) -> Trained:
        folder = self._folder / f"job-{self.findings.jobs}"
        folder.mkdir()
        self._diaries = Diaries(folder)
        wanted = self.wanted
        spec = job_spec(
            "bagua.chaos.training",
            module=True,
            name="chaos",
            args=[str(folder), str(wanted.workers)],
            island_size=wanted.island_size,
            env={"OMP_NUM_THREADS": "1"},  # the ranks of all nodes share the cores of this machine
            workdir=str(self._folder),
            nnodes=wanted.nnodes,
            nproc_per_node=wanted.nproc_per_node,
            elastic=True,
            min_nodes=1,
            max_nodes=wanted.nnodes,
            respawn=RESPAWN,
            python=sys.executable,
            stop_grace_s=2.0,
        )
        job_id = self._cluster.call(lambda client: client.submit(spec)).job_id
        self._jobs.append(job_id)
        self.findings.jobs += 1
        trained = Trained(job_id, folder, wanted.nnodes, {}, wanted.island_size)
        ranks = wanted.nnodes * wanted.nproc_per_node

        def begun() -> bool:
            job = self._cluster.job(job_id)
            if job.state in ENDED:
                raise ServiceError(f"The job did not begin: it is {job_state(job.state)}. {job.reason} [BG003]")
            return len(self._diaries.read()) >= ranks and self._goes_on(list(self._diaries.read()), 0.0)

        until(begun, "the job begins", PLACED_S)
        self._look(trained)
        return trained

    def _goes_on(self, pids: list[int], since: float) -> bool:
        """True if all of these ranks have made some steps since then."""
        diaries = self._diaries.read()
        return all(
            pid in diaries and sum(at > since for at in diaries[pid].steps[-STEPS_BETWEEN:]) == STEPS_BETWEEN
            for pid in pids
        )

    def _wait_steps(self, trained: Trained, since: float, what: str) -> None:
        """Raises ServiceError if a rank that should be there has ended, or does not go on."""

        def go_on_or_end() -> bool:
            return self._goes_on(trained.pids(), since) or not all(map(alive, trained.pids()))

        until(go_on_or_end, what)
        if gone := [pid for pid in trained.pids() if not alive(pid)]:
            raise ServiceError(f"{what}: ranks ended that should go on (processes {gone}). [BG003]")

    def _broke(self, trained: Trained, words: str) -> None:
        job = self._cluster.job(trained.job_id)
        events = self._cluster.call(lambda client: list(client.events(trained.job_id)))
        newest = "".join(f"\n    {event.kind}: {event.reason}" for event in events[-LAST_EVENTS:])
        waits = f" It waits: {job.waiting}." if job.waiting else ""
        waits += f" It does not grow: {job.growth}." if job.growth else ""
        state = f"The job is {job_state(job.state)}: {job.reason}.{waits} Its newest events:{newest}"
        self.findings.breach("stuck", f"{words} {state}")
        self._tell(f"BROKEN: {self.findings.broken['stuck'][-1]}")

    def _end_job(self, trained: Trained) -> None:
        """Asks for the end, waits for it, and judges what the ranks have written."""
        (trained.folder / "stop").touch()
        try:
            until(lambda: not any(map(alive, trained.pids())), "ranks end when they are asked to")
        except ServiceError as error:
            self._broke(trained, str(error))
            self._cluster.call(lambda client: client.cancel(trained.job_id, reason="chaos: it hangs"))
        diaries = self._diaries.read()
        for pid in trained.pids():
            if not (pid in diaries and diaries[pid].ended):
                self.findings.breach("stuck", f"process {pid} of job {trained.job_id} did not come to its end")
        for breach in violations(diaries):
            words = f"job {trained.job_id}: {breach.words}"
            self.findings.breach(breach.promise, words, breach.at - self._began, breach.count)
        for (ranks, number), digest in whole_epochs(diaries).items():
            first, job_id = self._whole.setdefault((ranks, number), (digest, trained.job_id))
            if first != digest:
                differ = f"{first} in job {job_id}, {digest} in job {trained.job_id}, and nobody was lost in either"
                self.findings.breach("different", f"after epoch {number} of {ranks} ranks the state is {differ}")
        self.findings.epochs += max((len(diary.epochs) for diary in diaries.values()), default=0)
        self.findings.steps += max((len(diary.steps) for diary in diaries.values()), default=0)

    def _check_end(self, job_id: str) -> None:
        """Checks that the job ends well, also if a host that was lost had to be fenced first."""
        until(lambda: self._cluster.job(job_id).state in ENDED, f"job {job_id} has ended")
        job = self._cluster.job(job_id)
        if job.state != SUCCEEDED:
            self.findings.breach("stuck", f"job {job_id} is {job_state(job.state)}: {job.reason}")


def what_is_there(postgresql: bool) -> set[Need]:
    """Returns what is there of all that faults may need: whether this user may mount disks and lose packets, and which
    database there is.
    """
    found: set[Need] = {"postgresql" if postgresql else "sqlite"}
    if os.geteuid() == 0:
        found.add("root")
    if not reason_against():
        found.add("firewall")
    return found
