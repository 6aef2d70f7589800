"""A job of scripted nodes for tests of the dashboard: it reports as training ranks do, prints, and ends on request."""

from __future__ import annotations

import threading
import time
from typing import Any

from bagua.client import Client
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

WAIT_S = 60.0
RUNNING = {"state": c.RANK_STATE_RUNNING, "pid": 77}
EXITED = {"state": c.RANK_STATE_EXITED}
SCRIPT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def _order(peer: Any) -> Any:
    """The next RunJob; what comes before it is of the job before."""
    while not isinstance(found := peer.next(), n.RunJob):
        pass
    return found


class ReportingJob:
    """Two nodes with two ranks each; ``slow`` computes three times as long as the others. Answers requests for logs.

    ``peers``: nodes of the coordinator's tests, welcomed.
    """

    def __init__(self, client: Client, peers: list[Any], name: str, slow: int = 2, **spec: Any) -> None:
        self._client, self._peers, self._slow = client, peers, slow
        made = c.JobSpec(
            name=name, entry="train.py", args=["--lr", SCRIPT], nnodes=len(peers), nproc_per_node=2, **spec
        )
        made.placement_timeout_s = 20
        self.job_id = client.submit(made).job_id
        self._orders = [_order(peer) for peer in peers]
        self._tell(n.LOCAL_PHASE_STARTED, RUNNING)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._answer, args=(peer,), daemon=True) for peer in peers]
        self._threads.append(threading.Thread(target=self._report, daemon=True))
        for thread in self._threads:
            thread.start()

    def _tell(self, phase: int, status: dict[str, Any]) -> None:
        for index, (peer, order) in enumerate(zip(self._peers, self._orders, strict=True)):
            peer.report(order, phase, {2 * index: status, 2 * index + 1: status})

    def _report(self) -> None:
        step = 0
        while not self._ended.wait(0.25):
            step += 5
            for rank in range(2 * len(self._peers)):
                compute = 30.0 if rank == self._slow else 10.0
                metrics = {"compute ms": compute, "comm exposed ms": 35.0 - compute, "comm hidden ms": 2.0}
                told = c.Progress(job_id=self.job_id, rank=rank, step=step, by_itself=rank > 0)
                if rank == 0:
                    metrics["loss"] = 1.0 / step
                    metrics["<b>acc</b>"] = 0.5
                    told.total = 10_000
                told.metrics.update(metrics)
                told.bytes.inside, told.bytes.between = step << 20, step << 18
                self._peers[rank // 2].send(n.NodeFact(progress=told))

    def _answer(self, peer: Any) -> None:
        """Each reader gets a line with markup from each rank. The end of the job ends the logs."""
        reads: list[n.ReadLog] = []
        while not self._ended.is_set():
            try:
                directive = peer.next(timeout=0.1)
            except Exception:
                continue
            if isinstance(directive, n.StopJob) and directive.job_id == self.job_id:  # not that of the job before
                self.end()
            if isinstance(directive, n.ReadLog):
                reads.append(directive)
                data = f"rank {directive.rank} says {SCRIPT}\n".encode()
                self._chunk(peer, directive, data=data)
        for read in reads:
            self._chunk(peer, read, offset=len(f"rank {read.rank} says {SCRIPT}\n"), data=b"the end\n", eof=True)

    @staticmethod
    def _chunk(peer: Any, read: n.ReadLog, **more: Any) -> None:
        chunk = c.LogChunk(rank=read.rank, **more)
        peer.send(n.NodeFact(log=n.LogReply(request_id=read.request_id, chunk=chunk)))

    def end(self) -> None:
        """All ranks end well. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self._tell(n.LOCAL_PHASE_STOPPED, EXITED)

    def close(self) -> None:
        """Ends the job and waits until the coordinator knows."""
        self.end()
        for thread in self._threads:
            thread.join(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while self._client.get(self.job_id).state not in (
            c.JOB_STATE_SUCCEEDED,
            c.JOB_STATE_FAILED,
            c.JOB_STATE_CANCELLED,
        ):
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.02)
