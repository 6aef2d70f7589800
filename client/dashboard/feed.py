"""Keeps what tabs look at: the cluster, asked now and then, and jobs, each watched by one thread for all tabs.

State is kept, not messages: a tab that is slow skips what is old, and costs no memory. Without tabs only running jobs
are asked for, every few seconds, so that charts of a job begin before somebody looks.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bagua.base.errors import BaguaError
from bagua.client import Client
from bagua.client.describe import ENDED
from bagua.dashboard.history import History, last_reports, report_of
from bagua.proto import common_pb2, job_pb2

LOOK_S = 2.0  # between two looks at the cluster while somebody watches
REST_S = 5.0  # and while nobody does
KEPT_JOBS = 64  # whose past is kept
KEPT_EVENTS = 500
RECORDED_JOBS = 16  # that run, the newest: their past is kept though nobody looks
RECORDED_RANKS = 256  # of all ranks, where a job has no more
LINGER_S = 20.0  # a job is watched so long after the last tab has gone
RUNNING = (
    common_pb2.JOB_STATE_PENDING,
    common_pb2.JOB_STATE_STARTING,
    common_pb2.JOB_STATE_RUNNING,
    common_pb2.JOB_STATE_STOPPING,
    common_pb2.JOB_STATE_WAITING,
)
MAX_RUNNING = 1_000  # unfinished jobs that are counted
Connect = Callable[[], Client]


class JobFeed:
    """State of one job for its tabs. Fields are read and changed under ``lock``; ``version`` changes with ``job``."""

    def __init__(self, job_id: str) -> None:
        self.lock = threading.Lock()
        self.job_id = job_id
        self.job = job_pb2.Job(job_id=job_id)
        self.version = 0
        self.history = History()
        self.events: deque[job_pb2.JobEvent] = deque(maxlen=KEPT_EVENTS)
        self.away = ""  # why the coordinator does not answer now
        self._nodes: dict[int, str] = {}
        self._generation = 0

    @property
    def ended(self) -> bool:
        """True if nothing will change any more."""
        return self.job.state in ENDED

    def put_job(self, job: job_pb2.Job) -> None:
        with self.lock:
            if job.generation != self._generation:
                if self._generation:
                    self.history.forget_ranks()
                self._generation = job.generation
            self.job = job
            self.version += 1
            self._nodes = {rank.rank: rank.node_id for rank in job.ranks}
            for report in last_reports(job):
                self._add_report(report)

    def put_progress(self, progress: common_pb2.Progress) -> None:
        with self.lock:
            self._add_report(progress)

    def put_event(self, event: job_pb2.JobEvent) -> None:
        """An event. One that is known already changes nothing."""
        with self.lock:
            # A new watch may begin before the last one has ended.
            if not self.events or event.seq > self.events[-1].seq:
                self.events.append(event)

    def _add_report(self, progress: common_pb2.Progress) -> None:
        self.history.add(report_of(progress, time.time(), self._nodes))


class Feeds:
    """Feeds of all jobs. ``connect`` makes a client; threads end with ``close``."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._jobs: OrderedDict[str, JobFeed] = OrderedDict()
        self._tabs: dict[str, int] = {}
        self._watched: dict[str, Client] = {}  # jobs with a watch, and its client
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._client = connect()
        self._lookers = 0
        self.nodes: dict[str, job_pb2.Node] = {}
        self.running: tuple[job_pb2.Job, ...] = ()
        self.recent: tuple[job_pb2.Job, ...] = ()  # those that ended last
        self.complete = False  # nodes were looked at, at least once
        self.version = 0  # of the three above
        self.away = ""
        self._thread = threading.Thread(target=self._look, daemon=True, name="dashboard cluster")
        self._thread.start()

    def close(self) -> None:
        """Ends the threads of all feeds."""
        self._closed.set()
        self._wake.set()
        self._client.close()  # ends a call that runs
        self._thread.join(5)

    @contextmanager
    def cluster(self) -> Iterator[None]:
        """Keeps nodes and jobs up to date while somebody looks at them."""
        with self._lock:
            self._lookers += 1
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._lookers -= 1

    @contextmanager
    def job(self, job_id: str) -> Iterator[JobFeed]:
        """Keeps that job up to date while somebody looks at it."""
        with self._lock:
            feed = self._feed(job_id)
            self._begin_watch(feed)
            self._tabs[job_id] = self._tabs.get(job_id, 0) + 1
        try:
            yield feed
        finally:
            with self._lock:
                self._tabs[job_id] -= 1
                if not self._tabs[job_id]:
                    del self._tabs[job_id]

    def _feed(self, job_id: str) -> JobFeed:
        feed = self._jobs.setdefault(job_id, JobFeed(job_id))
        self._jobs.move_to_end(job_id)
        for old in list(self._jobs)[: max(0, len(self._jobs) - KEPT_JOBS)]:
            if old not in self._tabs and old not in self._watched:
                del self._jobs[old]
        return feed

    def _begin_watch(self, feed: JobFeed) -> None:
        """Begins a watch, unless there is one. The caller holds the lock."""
        if feed.job_id in self._watched or self._closed.is_set():
            return
        client = self._watched[feed.job_id] = self._connect()
        for target in (self._watch, self._end_when_alone):  # a watch waits in gRPC: another thread must end it
            threading.Thread(target=target, args=(feed, client), daemon=True, name=f"dashboard {feed.job_id}").start()

    # ---- threads

    def _look(self) -> None:
        while not self._closed.is_set():
            looked = self._lookers > 0
            try:
                self._look_once(looked)
            except BaguaError as error:
                self._set_away(str(error))
            self._wake.wait(LOOK_S if looked else REST_S)
            self._wake.clear()

    def _look_once(self, looked: bool) -> None:
        running = tuple(self._client.list(RUNNING, MAX_RUNNING))
        recent = tuple(self._client.page(ENDED, 25)[0]) if looked else self.recent
        ended = {job.job_id for job in recent}  # one may have ended between the two questions
        running = tuple(job for job in running if job.job_id not in ended)
        nodes = {node.node_id: node for node in self._client.nodes()} if looked else self.nodes
        self._set_away("")
        if looked and not self.complete:
            self.complete = True
            self.version += 1
        if (running, recent, nodes) != (self.running, self.recent, self.nodes):
            self.running, self.recent, self.nodes = running, recent, nodes
            self.version += 1
        with self._lock:
            for feed in (self._jobs[job_id] for job_id in self._tabs):
                if not feed.ended:  # else its watch is over; one that failed because the coordinator was away goes on
                    self._begin_watch(feed)
        for job in running[:RECORDED_JOBS]:
            with self._lock:
                known = job.job_id in self._watched or not job.HasField("progress")
                unknown = None if known else self._feed(job.job_id)
            if unknown is not None:
                self._record(unknown, job)

    def _record(self, feed: JobFeed, job: job_pb2.Job) -> None:
        """Records a job that nobody watches: the last report of each rank, or of one of them if there are many."""
        ranks = job.spec.nnodes * job.spec.nproc_per_node
        if ranks <= RECORDED_RANKS:
            feed.put_job(self._client.get(job.job_id))
        elif job.HasField("progress"):
            feed.put_progress(job.progress)

    def _set_away(self, words: str) -> None:
        if words != self.away:
            self.away = words
            self.version += 1

    def _watch(self, feed: JobFeed, client: Client) -> None:
        """Watches the job until it has ended, or nobody has looked for a while."""
        try:
            with feed.lock:
                seen = feed.events[-1].seq if feed.events else 0
            feed.put_job(client.get(feed.job_id))  # has the newest report of each rank
            for update in client.watch(feed.job_id, after_seq=seen, on_away=lambda why: setattr(feed, "away", why)):
                feed.away = ""
                match update.WhichOneof("update"):
                    case "job":
                        feed.put_job(update.job)
                    case "event":
                        feed.put_event(update.event)
                    case "progress":
                        feed.put_progress(update.progress)
        except BaguaError as error:
            if self._watched.get(feed.job_id) is client:
                feed.away = str(error)
        finally:
            self._end_watch(feed, client)

    def _end_watch(self, feed: JobFeed, client: Client) -> None:
        """Idempotent. A tab that comes now begins another one."""
        with self._lock:
            if self._watched.get(feed.job_id) is client:
                del self._watched[feed.job_id]
        client.close()

    def _end_when_alone(self, feed: JobFeed, client: Client) -> None:
        alone = 0.0
        while alone < LINGER_S and not self._closed.wait(1.0):
            with self._lock:
                if self._watched.get(feed.job_id) is not client:
                    return
                alone = 0.0 if feed.job_id in self._tabs else alone + 1.0
        self._end_watch(feed, client)
