#!/usr/bin/env python3
"""The cost of the control plane: a real coordinator process on SQLite, and simulated daemons that speak its protocol.

    python tests/bench/control_plane.py
    python tests/bench/control_plane.py --rows queue --waiting 2000 --trivial 16
    python tests/bench/control_plane.py --output json --hosts 300
    python tests/bench/control_plane.py --compare --tls --postgres postgresql://postgres@127.0.0.1/bench

Rows: `queue` (trivial jobs through 8 slots), `wide` (one job on all hosts, and reads meanwhile), `elastic` (one job on
all hosts, which loses ranks), `beats` (daemons that do nothing), `old` (submitting where there are many old jobs). Each
has a coordinator of its own. Nothing is asserted: the figures depend on the machine, which runs the coordinator, the
daemons and the readers at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import select
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # tests/rig, whatever PYTHONSAFEPATH says

from rig.fleet import TRIVIAL, FleetProcess
from rig.old_jobs import count_jobs, insert_old_jobs

from bagua.base.rpc import CHANNEL_OPTIONS
from bagua.base.security import TlsFiles, call_metadata, channel_credentials
from bagua.client import Client
from bagua.proto import common_pb2, job_pb2, job_pb2_grpc

READY_S = 120.0
SUBMITTING = 32  # calls under way at once while a queue is filled
PAUSE_S = 0.02  # between two reads of one reader, and two looks at a state
SLOTS = 8

console = Console(stderr=True)


@dataclass(frozen=True)
class Row:
    """A figure. ``target``: what it is held against, in words."""

    what: str
    value: str
    target: str
    note: str = ""


@dataclass(frozen=True)
class Way:
    """The parts between callers and the coordinator's memory. The token is always there. ``postgres``: a URL of a
    database of this program's own, which each coordinator finds empty; empty: SQLite."""

    tls: bool = False
    postgres: str = ""

    @property
    def name(self) -> str:
        return f"{'TLS' if self.tls else 'no TLS'}, {'PostgreSQL' if self.postgres else 'SQLite'}"

    def arguments(self) -> list[str]:
        if self.postgres:
            empty(self.postgres)
        return [*(["--auto-tls", "localhost"] if self.tls else []), *self._database()]

    def _database(self) -> list[str]:
        return ["--database-url", self.postgres] if self.postgres else []


def empty(url: str) -> None:
    """Drops all tables."""
    import sqlalchemy as sa

    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP SCHEMA public CASCADE")
        connection.exec_driver_sql("CREATE SCHEMA public")
    engine.dispose()


class Coordinator:
    """``python -m bagua.daemon.coordinator`` with its usual settings, on loopback."""

    def __init__(self, state_dir: Path, *arguments: str, way: Way = Way()) -> None:
        arguments = (*arguments, *way.arguments())
        ready, write_end = os.pipe()
        command = [sys.executable, "-P", "-m", "bagua.daemon.coordinator", "--listen", "127.0.0.1:0"]
        command += ["--state-dir", str(state_dir), "--ready-fd", str(write_end), "--death-signal", *arguments]
        self._log = (state_dir.parent / "coordinator.log").open("w")
        self._process = subprocess.Popen(command, pass_fds=[write_end], stderr=self._log)
        os.close(write_end)
        with os.fdopen(ready) as lines:
            found = select.select([lines], [], [], READY_S)[0]
            line = json.loads(lines.readline() or "{}") if found else {}
        if "address" not in line:
            raise SystemExit(f"The coordinator does not start: {line.get('error', 'see ' + self._log.name)}")
        self.address: str = line["address"]
        self.token = Path(line["token_file"]).read_text()
        self.tls_folder: str = line["tls"]
        self.tls = TlsFiles.in_folder(Path(self.tls_folder)) if self.tls_folder else None

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def client(self) -> Client:
        return Client(self.address, token=self.token, tls=self.tls, timeout_s=300.0)

    def channel(self) -> grpc.Channel:
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(self.address, channel_credentials(self.tls), options=CHANNEL_OPTIONS)

    def fleet(self, hosts: int) -> FleetProcess:
        """Simulated daemons that dial it."""
        return FleetProcess(self.address, self.token, hosts, SLOTS, self.tls_folder)

    def cpu_s(self) -> float:
        """Processor time so far."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def memory(self) -> int:
        """Resident bytes."""
        return int(psutil.Process(self._process.pid).memory_info().rss)


# ---- small things


def spec(entry: str, nnodes: int = 1, nproc: int = 1, timeout_s: float = 86_400.0) -> common_pb2.JobSpec:
    """A job for simulated daemons."""
    return common_pb2.JobSpec(
        name="bench",
        entry=entry,
        no_python=True,
        nnodes=nnodes,
        nproc_per_node=nproc,
        placement_timeout_s=timeout_s,
        stop_grace_s=5.0,
    )


def quantile(values: list[float], part: float) -> float:
    """The value below which ``part`` of ``values`` lie."""
    return sorted(values)[min(len(values) - 1, math.ceil(part * len(values)) - 1)]


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr: call it with how many are done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def submit_many(coordinator: Coordinator, job: common_pb2.JobSpec, count: int, what: str) -> tuple[list[str], float]:
    """(ids of the jobs in their order, seconds)."""
    ids: list[str] = []
    waiting: list[Any] = []
    began = time.monotonic()
    with coordinator.channel() as channel, bar(what, count) as show:
        stub = job_pb2_grpc.JobServiceStub(channel)
        request = job_pb2.SubmitJobRequest(spec=job)
        for _ in range(count):
            if len(waiting) == SUBMITTING:
                ids.append(waiting.pop(0).result().job_id)
                show(len(ids))
            waiting.append(stub.SubmitJob.future(request, metadata=call_metadata(coordinator.token)))
        ids += [call.result().job_id for call in waiting]
    return ids, time.monotonic() - began


class Readers:
    """Threads that list and look at jobs and nodes, and note how long each answer takes."""

    def __init__(self, coordinator: Coordinator, job_id: str) -> None:
        self._shown = job_id
        self.seconds: dict[str, list[float]] = {"list --limit 1": [], "show": [], "nodes": []}
        self.errors: list[str] = []
        self._stop = threading.Event()
        self._client = coordinator.client()
        reads: list[Callable[[], object]] = [
            lambda: self._client.list(limit=1),
            lambda: self._client.get(self._shown),
            lambda: self._client.nodes(),
        ]
        self._threads = [
            threading.Thread(target=self._read, args=(name, read))
            for name, read in zip(self.seconds, reads, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    def show(self, job_id: str) -> None:
        """Look at this job from now on."""
        self._shown = job_id

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _read(self, name: str, read: Callable[[], object]) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                read()
            except Exception as error:
                self.errors.append(f"{name}: {error}")
            self.seconds[name].append(time.monotonic() - began)
            self._stop.wait(PAUSE_S)

    def rows(self) -> Iterator[Row]:
        for name, seconds in self.seconds.items():
            note = (
                f"{len(seconds)} reads, median {statistics.median(seconds) * 1e3:.0f} ms, longest {max(seconds):.2f} s"
            )
            failed = [error for error in self.errors if error.startswith(name)]
            note += f"; {len(failed)} failed, the last: {failed[-1]}" if failed else ""
            yield Row(f"  meanwhile: {name}, p99", f"{quantile(seconds, 0.99) * 1e3:.0f} ms", "100 ms", note)


# ---- the rows


def queue(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Trivial jobs through 8 slots: past jobs that do not fit, and then as a long queue themselves."""
    target = "50 jobs/s"
    with Coordinator(folder / "past", way=options.way) as coordinator:
        with coordinator.fleet(1) as fleet:
            fleet.wait_connected()
            rate, note = trivial_rate(coordinator, fleet, options)
            yield Row("trivial jobs through 8 slots, empty queue", rate, target, note)
        too_big = spec(TRIVIAL, nproc=SLOTS + 1)
        what = f"submitting {options.waiting} jobs"
        _, seconds = submit_many(coordinator, too_big, options.waiting, what)
        submitting = f"submitted in {seconds:.1f} s"
        with coordinator.fleet(1) as fleet:
            fleet.wait_connected()
            rate, note = trivial_rate(coordinator, fleet, options)
            yield Row(f"  past {options.waiting} that do not fit", rate, target, f"{note}; the others {submitting}")
    with Coordinator(folder / "through", way=options.way) as coordinator:
        _, seconds = submit_many(coordinator, spec(TRIVIAL), options.waiting, what)
        with coordinator.fleet(1) as fleet:
            began, cpu = time.monotonic(), coordinator.cpu_s()
            count = min(options.trivial, options.waiting)
            done, took = finished(fleet, 0, count, began, options.limit_s)
            note = f"{done} in {took:.1f} s, {(coordinator.cpu_s() - cpu) / max(1, done) * 1e3:.1f} ms of CPU each"
            what = f"  the first {count} of {options.waiting} that wait"
            yield Row(what, f"{done / took:.1f} jobs/s", target, f"{note}; submitted in {seconds:.1f} s")


def trivial_rate(coordinator: Coordinator, fleet: FleetProcess, options: argparse.Namespace) -> tuple[str, str]:
    """(jobs per second, how many in how long) from the first submission to the end of the last."""
    before, cpu, began = fleet.counts().finished, coordinator.cpu_s(), time.monotonic()
    ids, _ = submit_many(coordinator, spec(TRIVIAL), options.trivial, "trivial jobs")
    done, took = finished(fleet, before, options.trivial, began, options.limit_s)
    if done == options.trivial:
        with coordinator.client() as client:
            until_ended(client, ids[-1], options.limit_s)
        took = time.monotonic() - began
    each = (coordinator.cpu_s() - cpu) / max(1, done) * 1e3
    return f"{done / took:.1f} jobs/s", f"{done} in {took:.1f} s, {each:.1f} ms of CPU each"


def finished(fleet: FleetProcess, before: int, count: int, began: float, limit_s: float) -> tuple[int, float]:
    """(how many jobs have run, seconds since ``began``): ``count``, or those of ``limit_s`` seconds."""
    with bar("running", count) as show:
        while (done := fleet.counts().finished - before) < count and time.monotonic() < began + limit_s:
            show(done)
            time.sleep(PAUSE_S)
    return done, time.monotonic() - began


def until_ended(client: Client, job_id: str, limit_s: float) -> None:
    """Returns when the job has ended well. Raises RuntimeError or TimeoutError."""
    deadline = time.monotonic() + limit_s
    while (job := client.get(job_id)).state < common_pb2.JOB_STATE_SUCCEEDED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job_id} has not ended after {limit_s:g} s: {job.reason}")
        time.sleep(PAUSE_S)
    if job.state != common_pb2.JOB_STATE_SUCCEEDED:
        raise RuntimeError(f"{job_id} did not succeed: {job.reason}")


def wide(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """One job on every host, run and cancelled, several times; and what reads cost meanwhile."""
    shape = f"{options.hosts:,} x {SLOTS} ranks"
    phases: dict[str, list[Phase]] = {"RUNNING": [], "cancelled": []}
    with (
        Coordinator(folder / "wide", way=options.way) as coordinator,
        coordinator.fleet(options.hosts) as fleet,
        coordinator.client() as client,
    ):
        console.print(f"{options.hosts} daemons connect …")
        fleet.wait_connected(options.limit_s)
        with ExitStack() as stack:
            readers: Readers | None = None
            for _ in range(options.times):
                cpu, began = coordinator.cpu_s(), time.monotonic()
                job_id = client.submit(spec("train", options.hosts, SLOTS)).job_id
                if readers is None:
                    readers = Readers(coordinator, job_id)
                    stack.callback(readers.close)
                readers.show(job_id)
                at = until_state(client, job_id, common_pb2.JOB_STATE_RUNNING, began, options.limit_s, "RUNNING")
                last = fleet.counts().last_started_at
                phases["RUNNING"].append(Phase(at - last, at - began, coordinator.cpu_s() - cpu))
                cpu, began = coordinator.cpu_s(), time.monotonic()
                client.cancel(job_id)
                at = until_state(client, job_id, common_pb2.JOB_STATE_CANCELLED, began, options.limit_s, "CANCELLED")
                last = fleet.counts().last_stopped_at
                phases["cancelled"].append(Phase(at - last, at - began, coordinator.cpu_s() - cpu))
        for name, found in phases.items():
            yield _phase(f"{shape}: {name}", found)
        if readers is not None:
            yield from readers.rows()
        counts = fleet.counts()
        note = f"streams that broke: {counts.broken} {' '.join(counts.errors)}".strip()
        yield Row("  memory of the coordinator", f"{coordinator.memory() / 2**20:.0f} MiB", "", note)


def elastic(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """One elastic job on every host; its ranks are killed, one after the other, then it waits and goes on: when every
    host has been told."""
    with (
        Coordinator(folder / "elastic", way=options.way) as coordinator,
        coordinator.fleet(options.hosts) as fleet,
        coordinator.client() as client,
    ):
        console.print(f"{options.hosts} daemons connect …")
        fleet.wait_connected(options.limit_s)
        job = spec("train", options.hosts, SLOTS)
        job.elastic = True
        job_id, began = client.submit(job).job_id, time.monotonic()
        until_state(client, job_id, common_pb2.JOB_STATE_RUNNING, began, options.limit_s, "RUNNING")
        found: list[float] = []
        memory: list[int] = []
        cpu = coordinator.cpu_s()
        with bar("ranks are killed", options.losses) as show:
            for number in range(options.losses):
                told = (number + 1) * options.hosts
                fleet.kill_rank(number % options.hosts)
                counts = fleet.wait(lambda counts, told=told: counts.regrouped >= told, options.limit_s, "not told")
                found.append(counts.last_regrouped_at - counts.killed_at)
                memory.append(coordinator.memory())
                show(number + 1)
        spent = (coordinator.cpu_s() - cpu) / options.losses
        planned: list[float] = []
        with bar("the job waits and goes on", options.changes) as show:
            for number in range(options.changes):
                told += options.hosts
                asked = time.monotonic()
                (client.resume if number % 2 else client.pause)(job_id)
                counts = fleet.wait(lambda counts, told=told: counts.regrouped >= told, options.limit_s, "not told")
                planned.append(counts.last_regrouped_at - asked)
                memory.append(coordinator.memory())
                show(number + 1)
        what = f"{options.hosts:,} x {SLOTS} ranks: a rank is lost, all have the next generation"
        note = f"median of {len(found)}, longest {max(found):.2f} s; {spent:.2f} s of CPU each"
        yield Row(what, f"{statistics.median(found):.2f} s", "1 s", note)
        if planned:
            note = f"median of {len(planned)} pauses and resumptions, longest {max(planned):.2f} s"
            yield Row("  a planned change", f"{statistics.median(planned):.2f} s", "1 s", note)
        grown = (memory[-1] - memory[min(2, len(memory) - 1)]) / 2**20
        yield Row(
            "  memory of the coordinator", f"{memory[-1] / 2**20:.0f} MiB", "", f"{grown:+.0f} MiB since the third"
        )


@dataclass(frozen=True)
class Phase:
    """Seconds until a state was seen: since the last fact, and since it was asked for; CPU seconds meanwhile."""

    after_fact: float
    asked: float
    cpu: float


def _phase(what: str, phases: list[Phase]) -> Row:
    after = [max(0.0, phase.after_fact) for phase in phases]
    asked = statistics.median(phase.asked for phase in phases)
    cpu = statistics.median(phase.cpu for phase in phases)
    note = f"median of {len(phases)}, longest {max(after):.2f} s"
    note += f"; {asked:.1f} s since it was asked for; {cpu:.1f} s of CPU"
    return Row(what, f"{statistics.median(after):.2f} s", "3 s after the last fact", note)


def until_state(client: Client, job_id: str, state: int, began: float, limit_s: float, what: str) -> float:
    """When the newest job was seen in ``state``. Raises TimeoutError."""
    with bar(what, 0):
        while (job := client.list(limit=1)[0]).state < state:
            if time.monotonic() > began + limit_s:
                raise TimeoutError(f"not {what} after {limit_s:g} s: {job.reason}")
            time.sleep(PAUSE_S)
    if job.job_id != job_id or job.state != state:
        raise RuntimeError(f"{job.job_id} is {common_pb2.JobState.Name(job.state)}, not {what}: {job.reason}")
    return time.monotonic()


def beats(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Daemons that do nothing."""
    with (
        Coordinator(folder / "beats", way=options.way) as coordinator,
        coordinator.fleet(options.hosts) as fleet,
    ):
        console.print(f"{options.hosts} daemons connect …")
        fleet.wait_connected(options.limit_s)
        # Their arrival is over, and acknowledgements (every 15 s) have told all of them how often to speak.
        time.sleep(options.settle_s)
        cpu, began = coordinator.cpu_s(), time.monotonic()
        time.sleep(options.beat_s)
        share = (coordinator.cpu_s() - cpu) / (time.monotonic() - began)
        note = f"over {options.beat_s:g} s; streams that broke: {fleet.counts().broken}"
        yield Row(f"heartbeats of {options.hosts:,} daemons", f"{share:.1%} of a core", "10 %", note)


def old(options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Submitting where many jobs have ended: where they are kept, and as it is usually."""
    state = folder / "state"
    with Coordinator(state):
        pass  # makes the database
    database = state / "coordinator" / "coordinator.db"
    if not database.exists():
        database = next(path for path in state.rglob("*.db"))
    began = time.monotonic()
    with bar("old jobs", options.old) as show:
        insert_old_jobs(database, spec(TRIVIAL), options.old, show)
    console.print(f"{options.old} old jobs written in {time.monotonic() - began:.0f} s")
    size = database.stat().st_size
    keep = keeps_all()
    if keep:
        with Coordinator(state, *keep) as coordinator:
            yield submit_latency(coordinator, f"submit, {options.old:,} old jobs kept")
    began = time.monotonic()
    with Coordinator(state) as coordinator:
        note = f"serving after {time.monotonic() - began:.1f} s"
        row = submit_latency(coordinator, f"submit, {options.old:,} old jobs at the start")
        yield Row(row.what, row.value, row.target, f"{row.note}; {note}")
        left = count_jobs(database)
        while left > 10_100 and keep and time.monotonic() < began + options.limit_s:
            time.sleep(0.5)
            left = count_jobs(database)
        what = f"  old jobs left after {time.monotonic() - began:.0f} s"
        now = database.stat().st_size
        yield Row(what, f"{left:,}", "10,000 jobs", f"database {size / 1e6:.0f} MB before, {now / 1e6:.0f} MB after")


def keeps_all() -> list[str]:
    """Options that make a coordinator keep everything; none where it knows of no other way."""
    asked = [sys.executable, "-P", "-m", "bagua.daemon.coordinator", "--help"]
    text = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    return ["--keep", "forever"] if "--keep" in text else []


def submit_latency(coordinator: Coordinator, what: str) -> Row:
    """Submits 50 jobs one after the other; no node is there to run them."""
    seconds = []
    with coordinator.client() as client:
        client.list(limit=1)  # connected
        for _ in range(50):
            began = time.monotonic()
            job = client.submit(spec(TRIVIAL))
            seconds.append(time.monotonic() - began)
        cancelled = client.cancel(job.job_id)
    assert cancelled.job_id == job.job_id
    note = f"p99 {quantile(seconds, 0.99) * 1e3:.0f} ms"
    return Row(what, f"{statistics.median(seconds) * 1e3:.1f} ms", "20 ms", note)


ROWS = {"queue": queue, "wide": wide, "elastic": elastic, "beats": beats, "old": old}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--tls", action="store_true", help="mutual TLS between all of them")
    parser.add_argument("--postgres", metavar="URL", default="", help="a database of its own: all in it is DROPPED")
    parser.add_argument("--compare", action="store_true", help="first without TLS and on SQLite, and the ratio")
    parser.add_argument("--waiting", type=int, default=10_000, help="jobs in the queue")
    parser.add_argument("--trivial", type=int, default=500, help="jobs that are timed")
    parser.add_argument("--hosts", type=int, default=1_000)
    parser.add_argument("--times", type=int, default=5, help="how often the wide job is run")
    parser.add_argument("--losses", type=int, default=20, help="ranks of the elastic job that are killed")
    parser.add_argument("--changes", type=int, default=20, help="planned changes of the elastic job")
    parser.add_argument("--old", type=int, default=200_000, help="jobs that have ended")
    parser.add_argument("--beat-s", type=float, default=20.0, help="how long heartbeats are measured")
    parser.add_argument("--settle-s", type=float, default=20.0, help="pause before heartbeats are measured")
    parser.add_argument("--limit-s", type=float, default=600.0, help="how long one step may take")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the coordinator and the daemons inherit it
    way = Way(options.tls, options.postgres)
    ways = [Way(), way] if options.compare else [way]
    if options.compare and way == Way():
        parser.error("--compare compares with what --tls and --postgres ask for: give one of them, or both")
    found = {each.name: run(options, each) for each in ways}
    if options.output == "json":
        rows = {name: [asdict(row) for row in part] for name, part in found.items()}
        print(json.dumps({"system": platform.platform(), "cores": os.cpu_count(), "ways": rows}))
        return
    for name, part in found.items():
        table = Table("", "here", "target", "", title=name)
        for row in part:
            table.add_row(row.what, row.value, row.target, row.note)
        Console().print(table)
    if options.compare:
        plain, other = found.values()
        Console().print(compared(plain, other, way.name))


def run(options: argparse.Namespace, way: Way) -> list[Row]:
    options.way = way
    rows: list[Row] = []
    for name in options.rows:
        if name == "old" and way.postgres:
            continue  # it writes old jobs straight into a file of SQLite
        with tempfile.TemporaryDirectory() as folder:
            for row in ROWS[name](options, Path(folder)):
                rows.append(row)
                console.print(f"[dim]{way.name}: {row.what.strip()}: {row.value} ({row.note})", highlight=False)
    return rows


def compared(plain: list[Row], other: list[Row], name: str) -> Table:
    """How many times as much the second way costs; more jobs a second are less."""
    table = Table("", "no TLS, SQLite", name, "times", title="wanted: at most 2 times")
    values = {row.what: row.value for row in plain}
    for row in other:
        if row.what in values and row.target:
            before, after = (
                float(text.split()[0].rstrip("%").replace(",", "")) for text in (values[row.what], row.value)
            )
            times = before / after if "jobs/s" in row.value else after / before if before else math.nan
            table.add_row(row.what, values[row.what], row.value, f"{times:.2f}")
    return table


if __name__ == "__main__":
    main()
