"""How algorithms exchange, compared with the algorithms themselves; and the recommendation."""

import sys

import pytest

from bagua.algorithms import Algorithm
from bagua.base.algorithm_choice import NAMES, OPEN, parse
from bagua.base.errors import ConfigError
from bagua.tuning.advice import advise, predict
from bagua.tuning.exchanges import DEFAULT_CODECS, LOCAL_STEPS, OWN_OPTIMIZER, every_text, exchange_of
from bagua.tuning.network import parse_network
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


def made(text):
    name, arguments = parse(text)
    return Algorithm.init(name, **arguments)


@pytest.mark.parametrize("text", list(every_text(4)))
def test_every_text_is_an_algorithm_with_this_exchange(text):
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


def test_all_algorithms_of_the_registry_are_there():
    texts = list(every_text(4))
    assert len(texts) == len(set(texts))
    assert {text.partition(":")[0] for text in texts} == set(NAMES) - set(OPEN)
    assert set(DEFAULT_CODECS) | set(OWN_OPTIMIZER) <= set(NAMES)
    assert "decentralized:peer_selection_mode=shift_one" not in every_text(3)


def test_islands_are_advised_what_they_take():
    cluster = Cluster(parse_network("1gbit"), 2, ranks=2, island_size=2)

    def takes_shards(text):
        parts = vars(sys.modules[type(made(text)).__module__]).values()
        return all(getattr(part, "takes_shards", True) for part in parts)

    takes = {text for text in every_text(2) if takes_shards(text)}
    assert (
        len(takes) < len(list(every_text(2))) and {row.exchange.text for row in advise(PROFILE, cluster).rows} == takes
    )
    with pytest.raises(ConfigError, match="can't train with async"):
        advise(PROFILE, cluster, ["async"])


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
def test_bytes(text, hosts, sent):
    network = parse_network("1gbit")
    assert predict(PROFILE, Cluster(network, hosts), exchange_of(text)).sent_bytes == pytest.approx(sent, rel=1e-6)


def test_times_that_can_be_worked_out_by_hand():
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
