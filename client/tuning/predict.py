"""The model of a step: what one bucket costs between hosts, and when its result is there while backward computes.

Bytes and trips are those of the engine (csrc/core/collective). What an operation sends goes through one queue to each
peer, so operations hold the wire one after the other. Messages and computation of one operation overlap, so it holds
it for the longer of both. The last message's delay overlaps with the next operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bagua.tuning.network import Network
from bagua.tuning.profile import CodecSpeed, Speeds, StepProfile

# Patterns, or who exchanges with whom: all hosts, changing pairs of them, or each with both neighbours in a ring.
ALL_REDUCE = "all-reduce"
PAIR = "pair"
RING = "ring"

# As in the core: CHUNK_BYTES of engine/values/options.h, TILE and TOPK_BLOCK of codec/formats.h (encoded blocks have
# whole tiles), all others of collective/short_all_reduce.cpp.
CHUNK_BYTES = 512 << 10
DIRECT_BYTES, DIRECT_HOSTS = 32 << 10, 8
MIDDLE_BYTES = 512 << 10
TRIP_NS, BYTE_NS = 100_000.0, 1.0
TILE, TOPK_BLOCK = 1024, 16384

# Bytes sent for a byte of float32, scales of blocks included; topk: 1.5 times its density.
RATIOS = {
    **{"fp16": 0.5, "bf16": 0.5, "fp8_e4m3": 0.252, "fp8_e5m2": 0.252},
    **{"minmax8": 0.254, "int4": 0.133, "int2": 0.0645, "onebit": 0.0323},
}

# Share of ``Speeds.operation_s`` (an operation that moves next to nothing) that one more message between hosts costs.
# The rest is between rank and engine.
TRIP_SHARE = 0.5

TOPK_BYTES = 6 / 4
DEFAULT_DENSITY = 0.01


@dataclass(frozen=True)
class Cluster:
    """``hosts`` hosts with ``ranks`` ranks each, and ``network`` between any two of them. ``cores``: of a host.
    ``island_size``: of the ranks of a host, so many hold one copy of a sharded model together."""

    network: Network
    hosts: int
    ranks: int = 1
    cores: int = 1 << 16
    island_size: int = 1

    @classmethod
    def of(cls, profile: StepProfile, network: Network, hosts: int | None = None, ranks: int | None = None) -> Cluster:
        """Hosts like the one of the profile."""
        ranks = ranks or profile.ranks_per_host
        return cls(network, hosts or profile.hosts, ranks, profile.cores, profile.island_size)


@dataclass(frozen=True)
class Coding:
    """Encoding of float32 between hosts: a codec of ``bagua.algorithms.codec``, and topk's density."""

    codec: str
    density: float = DEFAULT_DENSITY

    @property
    def ratio(self) -> float:
        """Bytes sent for a byte of float32."""
        return TOPK_BYTES * self.density if self.codec == "topk" else RATIOS[self.codec]


@dataclass(frozen=True)
class Cost:
    """Cost of one operation. ``sent_bytes``: that leave a host. ``hold_s``: how long it holds wire or engine.
    ``tail_s``: from then until its result is there. ``work_s``: seconds of a core that the engine needs for it.
    """

    sent_bytes: float
    hold_s: float
    tail_s: float
    work_s: float


NOTHING = Cost(0.0, 0.0, 0.0, 0.0)


def allreduce_algorithm(hosts: int, nbytes: float) -> str:
    """The engine's choice for an all-reduce without a codec: "direct", "halving" or "ring" (``cheapest_pattern``)."""
    if hosts <= DIRECT_HOSTS and nbytes <= DIRECT_BYTES:
        return "direct"
    if nbytes > MIDDLE_BYTES:
        return "ring"
    moved, least = nbytes * BYTE_NS, 2 * (hosts - 1) / hosts * nbytes * BYTE_NS
    direct = TRIP_NS + (hosts - 1) * moved if hosts <= DIRECT_HOSTS else math.inf
    halving = 2 * math.floor(math.log2(hosts)) * TRIP_NS + least
    if hosts & (hosts - 1):  # hosts beyond a power of two give theirs to another one first, and get the result last
        halving += 2 * (TRIP_NS + moved)
    ring = 2 * (hosts - 1) * TRIP_NS + least
    if direct <= min(halving, ring):
        return "direct"
    return "halving" if halving <= ring else "ring"


def bucket_cost(
    nbytes: float, cluster: Cluster, speeds: Speeds, coding: Coding | None = None, pattern: str = ALL_REDUCE
) -> Cost:
    """Cost of the exchange of one bucket of ``nbytes``. ``coding``: the encoding, for buckets of float32 alone. With
    islands: of a bucket of each place in them, which share wires and cores."""
    if (places := cluster.island_size) > 1:
        alike = replace(cluster, ranks=cluster.ranks // places, island_size=1)
        one = bucket_cost(nbytes, alike, speeds, coding, pattern)
        return Cost(places * one.sent_bytes, places * one.hold_s, one.tail_s, places * one.work_s)
    hosts = 2 if pattern == PAIR and cluster.hosts > 1 else cluster.hosts
    local = nbytes / speeds.reduce if cluster.ranks > 1 else nbytes * (hosts - 1) / hosts / speeds.memory
    if hosts == 1:
        return Cost(0.0, speeds.operation_s + local, 0.0, local)
    if pattern == RING:
        sent, steps = _ring_of_neighbours(nbytes, hosts, coding)
    elif coding is not None:
        sent, steps = _scattered(nbytes, hosts, coding), 2
    else:
        sent, steps = _plain(nbytes, hosts)
    work = local + sent / speeds.socket
    if coding is not None:
        work += _coding_s(nbytes, hosts, coding, speeds, pattern)
    wire = _hold(sent, steps, cluster.network, speeds.operation_s * TRIP_SHARE)
    # A rank that sends to another one waits for its message that it is ready.
    delays = 2 if pattern == RING or (pattern == PAIR and coding is not None) else 1
    return Cost(sent, speeds.operation_s + max(wire, work), delays * cluster.network.delay_s, work)


def _plain(nbytes: float, hosts: int) -> tuple[float, int]:
    """Returns (bytes that leave a host, steps that follow each other) of an all-reduce without a codec."""
    algorithm = allreduce_algorithm(hosts, nbytes)
    least = 2 * (hosts - 1) / hosts * nbytes
    if algorithm == "direct":
        return (hosts - 1) * nbytes, 1
    if algorithm == "ring":
        return least, 2 * (hosts - 1)
    steps = 2 * math.floor(math.log2(hosts))
    return (least, steps) if hosts & (hosts - 1) == 0 else (least + 2 * nbytes, steps + 2)


def _scattered(nbytes: float, hosts: int, coding: Coding) -> float:
    """Bytes that the busiest host sends: its partial sums of the others' blocks, and the result of its own to all. A
    short vector has fewer blocks than there are hosts."""
    block = 4 * (TOPK_BLOCK if coding.codec == "topk" else TILE)
    own = min(nbytes, math.ceil(nbytes / block / hosts) * block)
    return (nbytes - own + own * (hosts - 1)) * coding.ratio


def _ring_of_neighbours(nbytes: float, hosts: int, coding: Coding | None) -> tuple[float, int]:
    messages = 1 if hosts == 2 else 2  # with two hosts both neighbours are the same one
    return messages * nbytes * (coding.ratio if coding else 1.0), 1


def _coding_s(nbytes: float, hosts: int, coding: Coding, speeds: Speeds, pattern: str) -> float:
    """Seconds of the engine's thread: each host encodes the others' blocks and the result of its own, and decodes all
    partial sums of its own block and the results of the others'."""
    # Where the codec was not measured it counts as fast as memory.
    speed = speeds.codecs.get(coding.codec) or CodecSpeed(speeds.memory, speeds.memory)
    if pattern == RING:
        # A host decodes its own message, too: it moves by what the others see.
        return nbytes * (1 / speed.encode + (3 if hosts > 2 else 2) / speed.decode)
    return nbytes * (1 / speed.encode + 2 * (hosts - 1) / hosts / speed.decode)


def _hold(sent: float, steps: int, network: Network, trip_s: float) -> float:
    """Seconds in which the queue of sends is not free. Each step but the first sends what the step before it has
    brought, in chunks: where a step's bytes take less than the delay and ``trip_s``, which the processors need for a
    message, the queue waits."""
    each = sent / steps / network.payload_rate
    chunk = min(each, CHUNK_BYTES / network.payload_rate)
    period = max(each, network.delay_s + trip_s + chunk)
    return each + (steps - 1) * period if steps > 1 else each


@dataclass(frozen=True)
class Bucket:
    """A bucket in the timeline: when its last gradient comes, seconds from the start of backward, and its cost."""

    ready_s: float
    cost: Cost


@dataclass(frozen=True)
class Timeline:
    """The course of buckets that start in their order. ``end_s``: when the last result is there, from the start of
    backward. ``sent_bytes``: by one host."""

    end_s: float
    sent_bytes: float


def timeline(buckets: Sequence[Bucket], backward_s: float) -> Timeline:
    """Buckets start in order, each when it and all before it are full, the last one at the end of backward."""
    free = latest = begun = 0.0
    for number, bucket in enumerate(buckets):
        ready = backward_s if number == len(buckets) - 1 else bucket.ready_s
        begun = max(begun, ready)
        free = max(free, begun) + bucket.cost.hold_s
        latest = max(latest, free + bucket.cost.tail_s)
    return Timeline(max(latest, backward_s), sum(bucket.cost.sent_bytes for bucket in buckets))


def slowed_by(work_s: float, profile: StepProfile, cluster: Cluster) -> float:
    """Seconds by which a rank computes longer, because the engine works beside it: none where it has a core of its
    own."""
    busy = cluster.ranks * profile.threads
    lacking = min(1, max(0, busy + 1 - cluster.cores))  # the engine computes in one thread
    return work_s * lacking / busy


@dataclass(frozen=True)
class Backward:
    """Backward beside an engine at work. ``ready_s``: of each parameter, ascending, from the start of backward."""

    ready_s: tuple[float, ...]
    end_s: float


def backward_of(profile: StepProfile, cluster: Cluster, coding: Coding | None = None) -> Backward:
    """Returns when gradients are ready while the engine exchanges earlier ones. Buckets play no part in it: the
    engine's work is that of all gradients in one, and its share that falls into backward slows backward down.
    """
    alone = profile.backward_ns / 1e9
    whole = bucket_cost(profile.bytes, cluster, profile.speeds, coding)
    beside = whole.work_s * min(1.0, alone / whole.hold_s) if whole.hold_s else 0.0
    stretch = 1 + slowed_by(beside, profile, cluster) / alone if alone else 1.0
    ready = 0.0
    found = []
    for parameter in profile.parameters:
        # Times are medians, and may come in another order than the gradients.
        ready = max(ready, min(parameter.ready_ns, profile.backward_ns) / 1e9 * stretch)
        found.append(ready)
    return Backward(tuple(found), alone * stretch)


@dataclass(frozen=True)
class Prediction:
    """Prediction of one step, medians: seconds, seconds of them in which ranks stand waiting, and bytes that leave a
    host.
    """

    step_s: float
    exposed_s: float
    sent_bytes: float


def predict_cuts(
    profile: StepProfile, cluster: Cluster, cuts: Sequence[Sequence[str]], coding: Coding | None = None
) -> Prediction:
    """A step that exchanges gradients in buckets of these parameters (names), in this order."""
    backward = backward_of(profile, cluster, coding)
    line = timeline(buckets_of(profile, cluster, cuts, backward, coding), backward.end_s)
    rest = (profile.forward_ns + profile.rest_ns) / 1e9
    return Prediction(rest + line.end_s, line.end_s - backward.end_s, line.sent_bytes)


def buckets_of(
    profile: StepProfile,
    cluster: Cluster,
    cuts: Sequence[Sequence[str]],
    backward: Backward,
    coding: Coding | None = None,
) -> list[Bucket]:
    """The buckets of these cuts, in their order. All parameters of one have one dtype."""
    place = {parameter.name: number for number, parameter in enumerate(profile.parameters)}
    found = []
    for names in cuts:
        numbers = [place[name] for name in names]
        nbytes = sum(profile.parameters[number].bytes for number in numbers)
        encodes = coding if profile.parameters[numbers[0]].dtype == "float32" else None
        cost = bucket_cost(nbytes, cluster, profile.speeds, encodes)
        found.append(Bucket(max(backward.ready_s[number] for number in numbers), cost))
    return found
