"""The model of a step against figures that can be worked out by hand, and against the engine's own numbers."""

from pathlib import Path

import pytest

import bagua.csrc
from bagua.csrc import load
from bagua.tuning.network import parse_network
from bagua.tuning.predict import CHUNK_BYTES, RATIOS, TOPK_BYTES, Cluster, Coding, allreduce_algorithm, bucket_cost
from bagua.tuning.profile import Speeds

FAST = Speeds(reduce=1e15, memory=1e15, socket=1e15, operation_s=0.0)
GBIT = parse_network("1gbit")
FAR = parse_network("1gbit,5ms")
MIB = 1 << 20


def test_bytes_and_time_of_an_all_reduce():
    two = bucket_cost(64 * MIB, Cluster(GBIT, 2), FAST)
    assert two.sent_bytes == 64 * MIB
    assert two.hold_s == pytest.approx(64 * MIB / GBIT.payload_rate)
    four = bucket_cost(64 * MIB, Cluster(GBIT, 4), FAST)
    assert four.sent_bytes == pytest.approx(1.5 * 64 * MIB)
    one = bucket_cost(64 * MIB, Cluster(GBIT, 1, ranks=2), Speeds(1e9, 1.0, 1.0, 1e-3))
    assert (one.sent_bytes, one.tail_s) == (0, 0)
    assert one.hold_s == pytest.approx(64 * MIB / 1e9 + 1e-3)


def test_islands_exchange_their_shards():
    """A host sends as much as if each island were one rank, in an operation for each place."""
    whole, shard = (
        bucket_cost(nbytes, cluster, FAST)
        for nbytes, cluster in (
            (64 * MIB, Cluster(GBIT, 2, ranks=2)),
            (32 * MIB, Cluster(GBIT, 2, ranks=4, island_size=2)),
        )
    )
    assert shard.sent_bytes == whole.sent_bytes and shard.tail_s == whole.tail_s
    assert shard.hold_s == pytest.approx(whole.hold_s + FAST.operation_s, rel=1e-2)


def test_delays():
    """A small message takes one trip; a long one hides all but the last."""
    small = bucket_cost(4096, Cluster(FAR, 2), FAST)
    assert small.hold_s + small.tail_s == pytest.approx(0.005, rel=0.01)
    large = bucket_cost(64 * MIB, Cluster(FAR, 2), FAST)
    assert large.hold_s + large.tail_s == pytest.approx(64 * MIB / FAR.payload_rate + 0.005, rel=1e-6)
    middle = bucket_cost(600_000, Cluster(FAR, 2), FAST)  # two trips that cannot hide
    assert middle.hold_s + middle.tail_s == pytest.approx(0.010 + 600_000 / FAR.payload_rate, rel=0.01)


def test_many_hosts():
    """A ring waits for a delay and a message's work at each of its 2 (h-1) trips where blocks are small; encoded blocks
    take two trips. Two encoded tiles have two owners, each of which sends its result to all."""
    awake = Speeds(reduce=1e15, memory=1e15, socket=1e15, operation_s=0.001)
    ring = bucket_cost(MIB, Cluster(FAR, 128), awake)
    assert ring.hold_s == pytest.approx(0.001 + 253 * (0.005 + 0.0005) + 2 * MIB / GBIT.payload_rate, rel=0.01)
    encoded = bucket_cost(16 * MIB, Cluster(FAR, 128), awake, Coding("fp16"))
    assert encoded.hold_s == pytest.approx(16 * MIB / FAR.payload_rate, rel=0.03)
    short = bucket_cost(8192, Cluster(FAR, 128), awake, Coding("fp16"))
    assert short.sent_bytes == pytest.approx((4096 + 127 * 4096) * 0.5)


def test_ratios_and_constants_are_those_of_the_engine():
    core = load()
    count = 1 << 20
    for name, ratio in RATIOS.items():
        assert core.encoded_bytes(core.CODECS[name], count, 0) / 4 / count == pytest.approx(ratio, rel=0.02)
    assert core.encoded_bytes(core.CODECS["topk"], count, 655) / 4 / count == pytest.approx(TOPK_BYTES / 100, rel=0.02)
    assert set(core.CODECS) - {"none"} == {*RATIOS, "topk"}
    assert f"chunk_bytes: int = {CHUNK_BYTES}" in (Path(bagua.csrc.__file__).parent / "core.pyi").read_text()


@pytest.mark.parametrize(
    ("hosts", "nbytes", "pattern"),
    [(2, 32768, "direct"), (2, 600_000, "ring"), (8, 300_000, "halving"), (9, 1000, "halving"), (3, 500_000, "ring")],
)
def test_the_choice_of_the_engine(hosts, nbytes, pattern):
    assert allreduce_algorithm(hosts, nbytes) == pattern
