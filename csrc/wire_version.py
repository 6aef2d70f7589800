"""Version of the wire formats between the ranks, daemons and hosts of one job."""

# It goes up with each change of these formats: the channel of a rank to its daemon, the connections of hosts, and the
# messages that ranks make of both (torch_api). Two that have the same number can talk, whatever their releases; others
# are not brought together: a job is placed on nodes that have one number. tests/unit/csrc/test_wire_version.py notices
# a change without a new number. The protocol of coordinator and daemons has a number of its own, because neighbouring
# versions of it can talk (base/protocol.py).
WIRE_VERSION = 22
