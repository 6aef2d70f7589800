"""Directives of large jobs are packed."""

import zlib
from dataclasses import replace

import pytest
from rig.coordinator.elastic_job import Cluster

from bagua.daemon.coordinator.streams.directives import Order, wish
from bagua.daemon.node.rules.job_specification import SpecificationError, parse_specification, unpack
from bagua.proto import node_pb2


def test_a_large_directive_is_packed_for_daemons_that_unpack():
    c = Cluster("ab")
    job = replace(c.job, hosts=tuple(replace(host, address="a" * 3000) for host in c.job.hosts))
    order = Order(wish(job), job)
    plain, packed = (order.to(job.hosts[1], packs) for packs in (False, True))
    assert len(packed) < len(plain) / 10
    run = node_pb2.Directive.FromString(packed).run
    assert not run.hosts and run.host_index == 1
    unpack(run)
    whole = node_pb2.Directive.FromString(plain).run
    for host in whole.hosts:
        host.ClearField("address")  # daemons don't need it
        host.ClearField("members")  # the same as the ranks
    assert run == whole
    small = Order(wish(c.job), c.job)
    assert small.to(c.job.hosts[0], True) == small.to(c.job.hosts[0], False)


@pytest.mark.parametrize(
    ("told", "taken"), [(0.0, 0.0), (320.0, 320.0), (float("nan"), 0.0), (-1.0, 0.0), (float("inf"), 0.0)]
)
def test_nodes_learn_how_long_hosts_of_the_job_wait(told, taken):
    before = replace(Cluster("ab").job, job_key=bytes(32))
    job = replace(before, patience_s=told)
    assert told == 0.0 or wish(job) != wish(before), "it is told when it changes"
    run = node_pb2.Directive.FromString(Order(wish(job), job).to(job.hosts[0])).run
    run.spec.entry = "train.py"
    assert parse_specification(run, "a").patience_s == taken


@pytest.mark.parametrize("packed", [b"no zlib", zlib.compress(b"\xff" * 100), zlib.compress(bytes(17 << 20))])
def test_a_packed_directive_that_is_none(packed):
    with pytest.raises(SpecificationError, match="a packed directive"):
        unpack(node_pb2.RunJob(packed=packed))
