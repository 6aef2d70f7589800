"""The number of all that ranks, daemons and hosts of one job say to each other."""

# It goes up with each change of these formats: the channel of a rank to its daemon, the connections of hosts, and the
# messages that ranks make of both (torch_api). Two that have the same number can talk, whatever their releases; others
# are not brought together. tests/unit/csrc/test_wire_version.py notices a change without a new number. The protocol of
# coordinator and daemons has a number of its own, for neighbours of it can talk (base/protocol.py).
WIRE_VERSION = 19
