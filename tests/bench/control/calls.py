"""Jobs for simulated daemons, and waits for what becomes of them."""

import statistics
import threading
import time

from rig.coordinator.fleet import TRIVIAL

from bagua.base.security import call_metadata
from bagua.proto import common_pb2, job_pb2, job_pb2_grpc

from .report import Row, bar, quantile

SUBMITTING = 32  # calls under way at once while a queue is filled
PAUSE_S = 0.02  # between two reads of one reader, and two looks at a state


def spec(entry, nnodes=1, nproc=1, timeout_s=86_400.0):
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


def submit_many(coordinator, job, count, what):
    """(ids of the jobs in their order, seconds)."""
    ids = []
    waiting = []
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


def finished(fleet, before, count, began, limit_s):
    """(how many jobs have run, seconds since ``began``): ``count``, or those of ``limit_s`` seconds."""
    with bar("running", count) as show:
        while (done := fleet.counts().finished - before) < count and time.monotonic() < began + limit_s:
            show(done)
            time.sleep(PAUSE_S)
    return done, time.monotonic() - began


def until_ended(client, job_id, limit_s):
    """Returns when the job has ended well. Raises RuntimeError or TimeoutError."""
    deadline = time.monotonic() + limit_s
    while (job := client.get(job_id)).state < common_pb2.JOB_STATE_SUCCEEDED:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{job_id} has not ended after {limit_s:g} s: {job.reason}")
        time.sleep(PAUSE_S)
    if job.state != common_pb2.JOB_STATE_SUCCEEDED:
        raise RuntimeError(f"{job_id} did not succeed: {job.reason}")


def until_state(client, job_id, state, began, limit_s, what):
    """When the newest job was seen in ``state``. Raises TimeoutError."""
    with bar(what, 0):
        while (job := client.list(limit=1)[0]).state < state:
            if time.monotonic() > began + limit_s:
                raise TimeoutError(f"not {what} after {limit_s:g} s: {job.reason}")
            time.sleep(PAUSE_S)
    if job.job_id != job_id or job.state != state:
        raise RuntimeError(f"{job.job_id} is {common_pb2.JobState.Name(job.state)}, not {what}: {job.reason}")
    return time.monotonic()


def submit_latency(coordinator, what, cancel=False):
    """Submits 50 jobs one after the other; no node is there to run them. ``cancel``: takes all of them away again."""
    seconds = []
    jobs = []
    with coordinator.client() as client:
        client.list(limit=1)  # connected
        for _ in range(50):
            began = time.monotonic()
            jobs.append(client.submit(spec(TRIVIAL)))
            seconds.append(time.monotonic() - began)
        for job in jobs if cancel else jobs[-1:]:
            assert client.cancel(job.job_id).job_id == job.job_id
    note = f"p99 {quantile(seconds, 0.99) * 1e3:.0f} ms"
    return Row(what, statistics.median(seconds) * 1e3, "ms", "20 ms", note)


class Readers:
    """Threads that list and look at jobs and nodes, and note how long each answer takes."""

    def __init__(self, coordinator, job_id):
        self._shown = job_id
        self.seconds = {"list --limit 1": [], "show": [], "nodes": []}
        self.errors = []
        self._stop = threading.Event()
        self._client = coordinator.client()
        reads = [
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

    def show(self, job_id):
        """Look at this job from now on."""
        self._shown = job_id

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._client.close()

    def _read(self, name, read):
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                read()
            except Exception as error:
                self.errors.append(f"{name}: {error}")
            self.seconds[name].append(time.monotonic() - began)
            self._stop.wait(PAUSE_S)

    def rows(self):
        for name, seconds in self.seconds.items():
            note = (
                f"{len(seconds)} reads, median {statistics.median(seconds) * 1e3:.0f} ms, longest {max(seconds):.2f} s"
            )
            failed = [error for error in self.errors if error.startswith(name)]
            note += f"; {len(failed)} failed, the last: {failed[-1]}" if failed else ""
            yield Row(f"  meanwhile: {name}, p99", quantile(seconds, 0.99) * 1e3, "ms", "100 ms", note)
