"""A job of scripted nodes for tests of the dashboard: it reports as training ranks do, prints, and ends on request."""

import json
import lzma
import queue
import threading
import time
from pathlib import Path

from bagua.base.machine_clock import clock_name
from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

WAIT_S = 60.0
RECORDED = Path(__file__).with_name("recorded_steps.json.xz")
CHUNK = 64 << 10  # bytes of output in a message
RUNNING = {"state": c.RANK_STATE_RUNNING, "pid": 77}
EXITED = {"state": c.RANK_STATE_EXITED}
KILLED = {"state": c.RANK_STATE_EXITED, "exit_code": -9, "signal": 9}
SCRIPT = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


def _order(peer):
    """The next RunJob; what comes before it is of the job before."""
    while not isinstance(found := peer.next(), n.RunJob):
        pass
    return found


class ReportingJob:
    """Two nodes with two ranks each; ``slow`` computes three times as long as the others. Answers requests for logs.

    ``peers``: nodes of the coordinator's tests, welcomed. ``output``: of each rank, after its first line.
    ``job_id``: one that has been submitted; empty: it is now.
    """

    def __init__(self, client, peers, name, slow=2, output=b"", job_id="", **spec):
        self._client, self._peers, self._slow, self._more_output = client, peers, slow, output
        self._reads = {}
        self.job_id = job_id or self._submit(name, **spec)
        self._orders = [_order(peer) for peer in peers]
        self._tell(n.LOCAL_PHASE_STARTED, RUNNING)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._answer, args=(peer,), daemon=True) for peer in peers]
        self._threads.append(threading.Thread(target=self._report, daemon=True))
        for thread in self._threads:
            thread.start()

    def _submit(self, name, **spec):
        made = c.JobSpec(
            name=name, entry="train.py", args=["--lr", SCRIPT], nnodes=len(self._peers), nproc_per_node=2, **spec
        )
        made.placement_timeout_s = 20
        return self._client.submit(made).job_id

    def _tell(self, phase, status):
        for index in range(len(self._peers)):
            self._tell_of(index, phase, status)

    def _tell_of(self, index, phase, status, lost=-1):
        """The node with this index tells of its ranks. ``lost``: the one that was killed."""
        order = self._orders[index]
        if not order.spec.elastic:
            self._peers[index].report(order, phase, {2 * index: status, 2 * index + 1: status})
            return
        host = order.hosts[order.host_index]
        told = {
            rank: {**(KILLED if rank == lost else status), "member": member}
            for rank, member in zip(host.ranks, host.members or host.ranks, strict=True)
        }
        more = {"entered": order.generation, "engine_address": f"127.0.0.1:{1_000 + index}"}
        self._peers[index].report(order, phase, told, **more)

    def lose_last(self):
        """Of an elastic job: the last rank is killed. The others go on in the next generation."""
        last = len(self._peers) - 1
        self._tell_of(last, n.LOCAL_PHASE_STARTED, RUNNING, lost=max(self._orders[last].hosts[-1].ranks))

    def _follow(self, peer, order):
        """A later generation is entered at once."""
        index = self._peers.index(peer)
        if order.generation > self._orders[index].generation:
            self._orders[index] = order
            self._tell_of(index, n.LOCAL_PHASE_STARTED, RUNNING)

    def _report(self):
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

    def _answer(self, peer):
        """Each reader gets what a rank has printed. The end of the job ends the logs."""
        while not self._ended.is_set():
            try:
                directive = peer.next(timeout=0.1)
            except queue.Empty:
                continue
            match directive:
                case n.StopJob() if directive.job_id == self.job_id:  # not that of the job before
                    self.end()
                case n.RunJob() if directive.job_id == self.job_id:
                    self._follow(peer, directive)
                case n.ReadLog():
                    self._print(peer, directive)
                case n.EndLog():
                    self._reads.pop(directive.request_id, None)
                case n.StartTrace():
                    self._trace(peer, directive.request_id)
                case n.ClockProbe():
                    clock = n.ClockReply(
                        request_id=directive.request_id, monotonic_ns=time.monotonic_ns(), clock=clock_name()
                    )
                    peer.send(n.NodeFact(clock=clock))
        for read_peer, read in list(self._reads.values()):
            if read_peer is peer:
                self._chunk(peer, read, offset=len(self._output(read.rank)), data=b"the end\n", eof=True)

    def _output(self, rank):
        return f"rank {rank} says {SCRIPT}\n".encode() + self._more_output

    def _print(self, peer, read):
        """As much as there is room for; the reader then asks for more."""
        output = self._output(read.rank)
        end = min(len(output), read.offset + (read.max_bytes or len(output)))
        self._reads[read.request_id] = peer, read
        for at in range(read.offset, end, CHUNK):
            last = at + CHUNK >= end
            if more := last and end < len(output):
                del self._reads[read.request_id]
            self._chunk(peer, read, offset=at, data=output[at : min(end, at + CHUNK)], more=more)

    @staticmethod
    def _trace(peer, request_id):
        """Three steps that two nodes with two ranks each have recorded once."""
        parts = [part for part in recorded_steps() if part.node_id == peer.node_id]
        for part in parts:
            reply = n.TraceReply(request_id=request_id, part=part, last=part is parts[-1])
            peer.send(n.NodeFact(trace=reply))

    @property
    def reads(self):
        """Logs that somebody follows."""
        return len(self._reads)

    @staticmethod
    def _chunk(peer, read, **more):
        chunk = c.LogChunk(rank=read.rank, **more)
        peer.send(n.NodeFact(log=n.LogReply(request_id=read.request_id, chunk=chunk)))

    def end(self):
        """All ranks end well. Idempotent."""
        if not self._ended.is_set():
            self._ended.set()
            self._tell(n.LOCAL_PHASE_STOPPED, EXITED)

    def close(self):
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


def recorded_steps():
    """A job of 2 nodes with 2 ranks each has trained three steps. Rank 2 computed 50 ms longer. Times are in the file
    in µs; fields of spans are in the order of ``names``."""
    names = ("phase", "name", "comm", "sequence", "begin_ns", "end_ns", "peer", "bytes")
    parts = []
    for part in json.loads(lzma.decompress(RECORDED.read_bytes())):
        found = c.TracePart(node_id=part["node"], rank=part["rank"], member=max(0, part["rank"]), hosts=part["hosts"])
        for values in part["spans"]:
            span = dict(zip(names, values, strict=True))
            found.spans.add(**{**span, "begin_ns": span["begin_ns"] * 1_000, "end_ns": span["end_ns"] * 1_000})
        parts.append(found)
    return parts
