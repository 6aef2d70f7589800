"""Traces of jobs travel from nodes through the coordinator, with the clocks of the nodes."""

import contextlib
import threading
import time

import grpc
import pytest

from bagua.proto import common_pb2 as c
from bagua.proto import node_pb2 as n

from .conftest import RUNNING

AHEAD_NS = 10**12


class Answering(threading.Thread):
    """A node that answers probes with a clock of its own, and records ``parts`` when it is asked to."""

    def __init__(self, peer, parts, last=True):
        super().__init__(daemon=True)
        self._peer, self._parts, self._last = peer, parts, last
        self.asked = None
        self.start()

    def run(self):
        with contextlib.suppress(grpc.RpcError, AssertionError):  # the stream's end
            self._serve()

    def _serve(self):
        while True:
            directive = self._peer.next()
            if isinstance(directive, n.ClockProbe):
                now = time.monotonic_ns() + AHEAD_NS
                reply = n.ClockReply(request_id=directive.request_id, monotonic_ns=now, clock="another machine")
                self._peer.send(n.NodeFact(clock=reply))
            elif isinstance(directive, n.StartTrace):
                self.asked = directive
                for number, part in enumerate(self._parts, 1):
                    last = self._last and number == len(self._parts)
                    reply = n.TraceReply(request_id=directive.request_id, part=part, last=last)
                    self._peer.send(n.NodeFact(trace=reply))
                if not self._last:
                    return


@pytest.fixture
def run(coordinator, client, connect, until):
    """(nodes a and b, their job with one rank each)."""
    peers = [connect(coordinator, name, slots=1) for name in "ab"]
    client.submit(c.JobSpec(entry="t.py", nnodes=2, nproc_per_node=1, placement_timeout_s=20))
    orders = [peer.expect(n.RunJob) for peer in peers]
    for order, peer in zip(orders, peers, strict=True):
        peer.report(order, n.LOCAL_PHASE_STARTED, {order.host_index: RUNNING}, engine_address="127.0.0.1:1")
    job_id = orders[0].job_id
    until(client, job_id, c.JOB_STATE_RUNNING)
    return (*peers, job_id)


def part(node, rank, **more):
    span = c.TraceSpan(phase="forward", begin_ns=AHEAD_NS, end_ns=AHEAD_NS + 5, peer=-1)
    return c.TracePart(node_id=node, rank=rank, spans=[span], **more)


def test_parts_and_clocks_of_all_nodes(run, client):
    a, b, job_id = run
    nodes = [Answering(a, [part("a", 0), part("a", 0), part("a", -1)]), Answering(b, [part("b", 1, missing="late")])]
    trace = client.trace(job_id, steps=7, timeout_s=20)
    assert [(node.asked.job_id, node.asked.steps, node.asked.timeout_s) for node in nodes] == [(job_id, 7, 20)] * 2
    assert {(one.node, one.rank): len(one.spans) for one in trace.sources} == {("a", 0): 2, ("a", -1): 1, ("b", 1): 1}
    assert trace.missing() == ["late"]
    assert trace.clocks.keys() == {"a", "b"}
    for clock in trace.clocks.values():
        assert 0 < clock.bound and abs(clock.offset + AHEAD_NS) <= clock.bound


def test_a_node_that_goes_away_is_named(run, client):
    a, b, job_id = run
    Answering(a, [part("a", 0)])
    leaving = Answering(b, [part("b", 1)], last=False)
    threading.Thread(target=lambda: (leaving.join(20), b.close()), daemon=True).start()
    trace = client.trace(job_id, timeout_s=20)
    assert trace.missing() == ["node b has lost its connection meanwhile"]
    assert "a" in {one.node for one in trace.sources if one.spans}  # what b sent may be lost with the connection


def test_a_node_that_sends_too_much_is_cut_off(run, client):
    a, b, job_id = run
    spans = [c.TraceSpan(phase="forward", peer=-1)] * 20_000
    flood = [c.TracePart(node_id="a", rank=0, spans=spans)] * 6
    Answering(a, flood), Answering(b, [part("b", 1)])
    assert client.trace(job_id, timeout_s=20).missing() == ["node a sent more than it was asked for"]
