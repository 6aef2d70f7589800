"""How algorithms exchange, compared with the algorithms themselves; and the recommendation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bagua.algorithms import Algorithm
from bagua.base.algorithm_choice import NAMES, OPEN, parse
from bagua.base.errors import ConfigError
from bagua.tuning.advice import advise, predict
from bagua.tuning.exchanges import (
    DEFAULT_CODECS,
    LOCAL_STEPS,
    OTHER,
    OWN_OPTIMIZER,
    ROUNDED,
    SAME,
    every_text,
    exchange_of,
)
from bagua.tuning.network import Network, parse_network
from bagua.tuning.predict import RATIOS, Cluster
from bagua.tuning.profile import CodecSpeed, Gradient, Speeds, StepProfile

SPEEDS = Speeds(1e12, 1e12, 1e12, 0.0, dict.fromkeys((*RATIOS, "topk"), CodecSpeed(1e13, 1e13)))
MS = 1_000_000
PROFILE = StepProfile(
    tuple(Gradient(f"p{number}", "float32", 1 << 20, (number + 1) * 10 * MS, rows=1024) for number in range(10)),
    *(50 * MS, 100 * MS, 50 * MS),
    cores=8,
    speeds=SPEEDS,
)
BYTES = 40 << 20


def made(text: str) -> Any:
    name, arguments = parse(text)
    return Algorithm.init(name, **arguments)


@pytest.mark.parametrize("text", list(every_text(4)))
def test_every_text_is_an_algorithm_with_this_exchange(text: str) -> None:
    algorithm, exchange = made(text), exchange_of(text)
    assert exchange.text == text
    codec = getattr(algorithm, "codec", None)
    if exchange.name != "bytegrad":
        assert (codec.name if codec else None) == (exchange.coding.codec if exchange.coding else None)
    if codec is not None and codec.density is not None:
        assert exchange.coding is not None and exchange.coding.density == codec.density
    interval = getattr(algorithm, "interval", getattr(algorithm, "communication_interval", 1))
    assert exchange.interval == (interval if exchange.name != "zero_one_adam" else LOCAL_STEPS)
    for ours, theirs in (("fragments", "fragments"), ("overlap", "overlap"), ("rank", "rank")):
        if hasattr(algorithm, theirs):
            assert getattr(exchange, ours) == getattr(algorithm, theirs)
    if hasattr(algorithm, "sync_interval_ms"):
        assert exchange.pause_s == algorithm.sync_interval_ms / 1e3
    if hasattr(algorithm, "min_compression_rate"):
        assert exchange.min_compression_rate == algorithm.min_compression_rate


def test_all_algorithms_of_the_registry_are_there() -> None:
    texts = list(every_text(4))
    assert len(texts) == len(set(texts))
    assert {text.partition(":")[0] for text in texts} == set(NAMES) - set(OPEN)
    assert set(DEFAULT_CODECS) | set(OWN_OPTIMIZER) <= set(NAMES)
    assert "decentralized:peer_selection_mode=shift_one" not in every_text(3)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("gradient_allreduce", SAME),
        ("gradient_allreduce:codec=none", SAME),
        ("gradient_allreduce:codec=fp16", ROUNDED),
        ("gradient_allreduce:codec=int4", OTHER),
        ("bytegrad", ROUNDED),
        ("local_sgd:interval=1", OTHER),
    ],
)
def test_which_keep_the_result(text: str, kept: str) -> None:
    assert exchange_of(text).keeps == kept


@pytest.mark.parametrize("text", ["nothing", "combine", "local_sgd:codec=zip", "gradient_allreduce:x=1", ":"])
def test_what_cannot_be_predicted_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        exchange_of(text)


@pytest.mark.parametrize(
    ("text", "hosts", "sent"),
    [
        ("gradient_allreduce", 2, BYTES),
        ("gradient_allreduce", 4, 1.5 * BYTES),
        ("bytegrad", 2, RATIOS["minmax8"] * BYTES),
        ("top_k:density=0.1", 2, 0.15 * BYTES),
        ("local_sgd:interval=8", 2, BYTES / 8),
        ("diloco:codec=int4,interval=10", 2, RATIOS["int4"] * BYTES / 10),
        ("streaming_diloco", 2, RATIOS["int4"] * BYTES / 16),
        ("low_precision_decentralized", 2, RATIOS["minmax8"] * BYTES),
        ("low_precision_decentralized", 4, 2 * RATIOS["minmax8"] * BYTES),
        ("decentralized", 2, BYTES),
        ("decentralized:peer_selection_mode=shift_one", 8, BYTES),
        ("decentralized:communication_interval=2", 2, BYTES / 2),
        ("no_loco", 2, BYTES / 16),
        ("power_sgd:rank=1", 2, 10 * 4 * 2 * 1024),
        ("power_sgd", 2, 10 * 4 * 2 * 2048),
        ("one_bit_adam", 2, RATIOS["onebit"] * BYTES),
        ("zero_one_adam", 2, RATIOS["onebit"] * BYTES / 4),
    ],
)
def test_bytes(text: str, hosts: int, sent: float) -> None:
    """Those that algorithms/README.md has."""
    network = parse_network("1gbit")
    assert predict(PROFILE, Cluster(network, hosts), exchange_of(text)).sent_bytes == pytest.approx(sent, rel=1e-6)


def test_times_that_can_be_worked_out_by_hand() -> None:
    """10 parameters of 4 MiB; each takes 35 ms at 1 Gbit/s. Backward 100 ms, forward and the rest 50 each."""
    network = parse_network("1gbit")
    cluster = Cluster(network, 2, cores=8)
    wire = BYTES / network.payload_rate
    step = {
        text: predict(PROFILE, cluster, exchange_of(text)).step_s
        for text in (
            "gradient_allreduce",
            "local_sgd",
            "decentralized",
            "streaming_diloco:codec=none,overlap=3",
            "async",
        )
    }
    assert step["gradient_allreduce"] == pytest.approx(0.050 + 0.010 + wire + 0.050, rel=0.01)
    assert step["local_sgd"] == pytest.approx(0.2 + wire / 4, rel=0.01)
    assert step["decentralized"] == pytest.approx(0.050 + wire, rel=0.01)
    assert step["streaming_diloco:codec=none,overlap=3"] == pytest.approx(0.2, rel=0.01)
    assert step["async"] == pytest.approx(0.2, rel=0.01)
    alone = predict(PROFILE, Cluster(network, 1), exchange_of("local_sgd"))
    assert (alone.step_s, alone.exposed_s, alone.sent_bytes) == (PROFILE.compute_s, 0, 0)


def test_recommendations() -> None:
    slow = advise(PROFILE, Cluster(parse_network("100mbit"), 2, cores=8))
    assert slow.keeps.exchange.text == "gradient_allreduce"
    assert slow.rounded is not None and slow.rounded.exchange.keeps == ROUNDED
    assert slow.other is not None and slow.other.exchange.advisable
    assert slow.other.prediction.step_s < slow.rounded.prediction.step_s < slow.keeps.prediction.step_s
    times = [row.prediction.step_s for row in slow.rows]
    assert times == sorted(times)
    fast = advise(PROFILE, Cluster(Network(), 2, cores=8))
    assert (fast.recommended, fast.rounded, fast.other) == ([fast.keeps], None, None)
    few = advise(PROFILE, Cluster(parse_network("100mbit"), 2, cores=8), ["qadam", "gradient_allreduce:codec=onebit"])
    assert len(few.rows) == 3
    assert few.recommended == [few.keeps]  # one needs another optimizer, the other loses accuracy


def test_more_ranks_of_a_host_share_the_wire() -> None:
    """Pairs of ranks send a message each; an all-reduce sends one for the host."""
    one, four = (Cluster(parse_network("1gbit"), 4, ranks, cores=64) for ranks in (1, 4))
    profile = dataclasses.replace(PROFILE, ranks_per_host=4)
    for text, times in (("gradient_allreduce", 1.0), ("no_loco", 4 * 12 / 15)):
        sent = [predict(profile, cluster, exchange_of(text)).sent_bytes for cluster in (one, four)]
        assert sent[1] == pytest.approx(sent[0] * times)
