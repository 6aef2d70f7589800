"""The exchanges of each algorithm, once its warm-up is over: when, with whom, encoded how, and what ranks compute for
it.

Algorithms are texts, as ``bagua run --algorithm`` takes them. Defaults and sizes are those of ``bagua.algorithms``,
which needs torch; a test compares them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bagua.base.algorithm_choice import CODECS, NAMES, OPEN, PARAMETERS, check, parse
from bagua.base.errors import ConfigError
from bagua.tuning.predict import ALL_REDUCE, DEFAULT_DENSITY, PAIR, RING, Coding

IN_BACKWARD = "in backward"
BESIDE = "beside forward and backward"
AFTER = "after the step"
STREAMED = "streamed"
BACKGROUND = "in the background"
THIN = "thin matrices"

SAME = "yes"
ROUNDED = "rounded"
OTHER = "no"

# Codecs whose only effect is a rounding error: nothing is sent later.
ROUNDING = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8")

# Codecs that lose accuracy except where an algorithm is made for them (algorithms/README.md).
COARSE = ("int2", "onebit", "topk")

OWN_OPTIMIZER = {
    "qadam": "QAdamOptimizer",
    "one_bit_adam": "OneBitAdamOptimizer",
    "zero_one_adam": "ZeroOneAdamOptimizer",
}

DEFAULT_CODECS = {
    "bytegrad": "minmax8",
    "low_precision_decentralized": "minmax8",
    "one_bit_adam": "onebit",
    "qadam": "minmax8",
    "streaming_diloco": "int4",
    "top_k": "topk",
    "zero_one_adam": "onebit",
}
DEFAULT_INTERVALS = {"local_sgd": 4, "diloco": 16, "streaming_diloco": 16, "no_loco": 16}
LOCAL_STEPS = 4  # steps from one exchange of ``zero_one_adam`` to the next, at the end (``local_step_clipper``)

# Passes over memory that a rank makes for an exchange, before and after it, in units of ``a += b``. Those of the plans
# (``Local`` steps).
PASSES = {
    "async": (1.0, 2.0),
    "decentralized": (1.0, 1.0),
    "diloco": (1.0, 6.0),
    "local_sgd": (0.0, 0.0),
    "low_precision_decentralized": (5.0, 5.0),
    "no_loco": (2.0, 5.0),
    "one_bit_adam": (2.0, 2.0),
    "power_sgd": (1.5, 1.5),
    "qadam": (2.0, 0.0),
    "streaming_diloco": (1.0, 6.0),
    "zero_one_adam": (2.0, 2.0),
}

PASSES_OF_DIFFERENCES = (1.0, 2.0)  # the same where a codec makes weights travel as differences

# Codecs that an algorithm takes, or was made for; others take all.
ALLOWED = {"no_loco": ("none", "fp16", "bf16"), "qadam": ("minmax8", "onebit")} | dict.fromkeys(
    ("one_bit_adam", "zero_one_adam"), ("onebit",)
)


@dataclass(frozen=True)
class Exchange:
    """An algorithm, after its warm-up.

    ``when``: one of the words above. ``interval``: steps from one exchange to the next. ``overlap``: steps that it has
    to arrive. ``fragments``: exchanges into which it falls. ``pause_s``: the least time between two of them.
    ``before``, ``after``: passes over memory. ``rank``: of thin matrices. ``keeps``: whether the result is that of
    gradient all-reduce. ``hosts_pair``: pairs are of hosts, not of ranks.
    """

    text: str
    when: str
    pattern: str = ALL_REDUCE
    coding: Coding | None = None
    interval: int = 1
    overlap: int = 0
    fragments: int = 1
    pause_s: float = 0.0
    before: float = 0.0
    after: float = 0.0
    rank: int = 0
    min_compression_rate: float = 2.0
    keeps: str = OTHER
    hosts_pair: bool = True

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    @property
    def optimizer(self) -> str:
        """The optimizer that it needs; empty if it takes any."""
        return OWN_OPTIMIZER.get(self.name, "")

    @property
    def advisable(self) -> bool:
        """True if it may be recommended without knowing more: it takes the user's optimizer, and its codec is not
        known to lose accuracy."""
        coarse = self.coding is not None and self.coding.codec in COARSE and self.name != "top_k"
        return not self.optimizer and not coarse


def exchange_of(text: str) -> Exchange:
    """The exchange of an algorithm of the library. Raises ConfigError for others, and for what can't be read."""
    name, given = parse(check(text))
    if name in OPEN:
        raise ConfigError(
            f"{text}: name the algorithm that {name} chooses; its exchange is predicted by its own name. [BG005]"
        )
    codec = given.get("codec", DEFAULT_CODECS.get(name))
    coding = None
    if codec not in (None, "none"):
        coding = Coding(codec, float(given.get("density", DEFAULT_DENSITY)))
    before, after = PASSES.get(name, (0.0, 0.0))
    if coding is not None and name in ("local_sgd", "decentralized"):  # weights travel as differences then
        before, after = PASSES_OF_DIFFERENCES
    interval = int(given.get("interval", given.get("communication_interval", DEFAULT_INTERVALS.get(name, 1))))
    common: dict[str, Any] = {
        "text": text,
        "coding": coding,
        "interval": max(1, interval),
        "before": before,
        "after": after,
        "keeps": _keeps(name, coding),
    }
    pattern = PAIR if given.get("peer_selection_mode", "all") == "shift_one" else ALL_REDUCE
    match name:
        case "async":
            pause = float(given.get("sync_interval_ms", 500)) / 1e3
            return Exchange(when=BACKGROUND, pattern=pattern, hosts_pair=False, pause_s=pause, **common)
        case "decentralized":
            hosts_pair = bool(given.get("hierarchical", True))
            return Exchange(when=BESIDE, pattern=pattern, hosts_pair=hosts_pair, **common)
        case "diloco" | "local_sgd":
            return Exchange(when=AFTER, **common)
        case "low_precision_decentralized":
            return Exchange(when=AFTER, pattern=RING, **common)
        case "no_loco":
            return Exchange(when=AFTER, pattern=PAIR, hosts_pair=bool(given.get("hierarchical", False)), **common)
        case "power_sgd":
            least = float(given.get("min_compression_rate", 2.0))
            return Exchange(when=THIN, rank=int(given.get("rank", 2)), min_compression_rate=least, **common)
        case "streaming_diloco":
            fragments, overlap = int(given.get("fragments", 4)), int(given.get("overlap", 1))
            return Exchange(when=STREAMED, fragments=fragments, overlap=overlap, **common)
        case "zero_one_adam":
            return Exchange(when=AFTER, **{**common, "interval": LOCAL_STEPS})
    return Exchange(when=IN_BACKWARD, **common)


def _keeps(name: str, coding: Coding | None) -> str:
    if name == "gradient_allreduce" and coding is None:
        return SAME
    rounds = coding is not None and coding.codec in ROUNDING
    return ROUNDED if name in ("gradient_allreduce", "bytegrad") and rounds else OTHER


def every_text(hosts: int) -> Iterator[str]:
    """Every algorithm of the library with its defaults, and with each codec that it takes."""
    for name in NAMES:
        if name in OPEN:
            continue
        modes = [""]
        if name == "decentralized" and hosts % 2 == 0:  # pairs need an even number
            modes.append("peer_selection_mode=shift_one")
        codecs = ALLOWED.get(name, CODECS) if "codec" in PARAMETERS[name] else ()
        for mode in modes:
            yield f"{name}:{mode}" if mode else name
            for codec in codecs:
                if codec != DEFAULT_CODECS.get(name, "none"):
                    yield f"{name}:{mode + ',' if mode else ''}codec={codec}"
