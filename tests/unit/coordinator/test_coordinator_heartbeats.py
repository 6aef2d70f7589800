"""How often daemons speak: few of them often, many of them seldom, and each twice within its lease."""

import pytest

from bagua.daemon.coordinator.api.nodes_servicer import heartbeat_interval
from bagua.proto import node_pb2


@pytest.mark.parametrize(("nodes", "seconds"), [(1, 3.0), (450, 3.0), (600, 4.0), (1_000, 4.5), (100_000, 4.5)])
def test_many_daemons_speak_less_often(nodes, seconds):
    assert heartbeat_interval(node_pb2.Welcome(heartbeat_s=3.0, lease_s=10.0), nodes) == seconds
