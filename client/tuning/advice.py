"""Predicts a step of every algorithm from a profile, and recommends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bagua.base.errors import ConfigError
from bagua.tuning.exchanges import (
    AFTER,
    BACKGROUND,
    BESIDE,
    ROUNDED,
    SAME,
    STREAMED,
    THIN,
    Exchange,
    every_text,
    exchange_of,
)
from bagua.tuning.partition import Cuts, default_cuts
from bagua.tuning.predict import (
    NOTHING,
    PAIR,
    Bucket,
    Cluster,
    Coding,
    Cost,
    Prediction,
    backward_of,
    bucket_cost,
    predict_cuts,
    slowed_by,
    timeline,
)
from bagua.tuning.profile import Gradient, StepProfile

NO_SHARDS = ("async",)  # islands refuse it
WORTH_IT = 0.10  # Share of the step that an algorithm with another result must save to be recommended


@dataclass(frozen=True)
class Row:
    """An algorithm and its predicted step."""

    exchange: Exchange
    prediction: Prediction


@dataclass(frozen=True)
class Advice:
    """Advice for a model on a cluster: all rows, the fastest first. ``keeps``: the fastest with the result of gradient
    all-reduce. ``rounded``: the fastest that only rounds gradients, ``other``: the fastest of all that may be
    recommended; each None unless it is faster than those before by more than WORTH_IT.
    """

    rows: tuple[Row, ...]
    keeps: Row
    rounded: Row | None
    other: Row | None

    @property
    def recommended(self) -> list[Row]:
        return [row for row in (self.keeps, self.rounded, self.other) if row is not None]


def advise(profile: StepProfile, cluster: Cluster, texts: Sequence[str] | None = None) -> Advice:
    """Predictions for these algorithms (None: all, with all codecs). The first of the rows with the result of gradient
    all-reduce is gradient all-reduce itself, which is always among them. Raises ConfigError for one that islands
    refuse."""
    chosen = list(every_text(cluster.hosts)) if texts is None else list(texts)
    if cluster.island_size > 1:
        refused = [text for text in chosen if text.startswith(NO_SHARDS)]
        if refused and texts is not None:
            raise ConfigError(f"Islands can't train with {', '.join(refused)}: name another --algorithm. [BG618]")
        chosen = [text for text in chosen if text not in refused]
    if "gradient_allreduce" not in chosen:
        chosen.insert(0, "gradient_allreduce")
    rows = [Row(exchange, predict(profile, cluster, exchange)) for exchange in map(exchange_of, chosen)]
    # Where steps are equal, fewer bytes come first.
    rows.sort(key=lambda row: (row.prediction.step_s, row.prediction.sent_bytes))
    keeps = next(row for row in rows if row.exchange.keeps == SAME)
    rounded = next((row for row in rows if row.exchange.keeps == ROUNDED), None)
    if rounded is not None and not _worth(rounded, keeps):
        rounded = None
    other = next((row for row in rows if row.exchange.advisable), None)
    if other is not None and (
        other.exchange.keeps in (SAME, ROUNDED) or not _worth(other, rounded if rounded is not None else keeps)
    ):
        other = None
    return Advice(tuple(rows), keeps, rounded, other)


def _worth(row: Row, against: Row) -> bool:
    return row.prediction.step_s < (1 - WORTH_IT) * against.prediction.step_s


def predict(profile: StepProfile, cluster: Cluster, exchange: Exchange, cuts: Cuts | None = None) -> Prediction:
    """A step of the algorithm after its warm-up, the mean over its interval. ``cuts``: buckets of gradients; None: the
    default ones."""
    if cluster.hosts * cluster.ranks == cluster.island_size:  # a single copy of the model exchanges nothing
        return Prediction(profile.compute_s, 0.0, 0.0)
    model = _Model(profile, cluster, exchange, cuts or default_cuts(profile))
    ways = {
        THIN: model.thin,
        BESIDE: model.beside,
        AFTER: model.after,
        STREAMED: model.streamed,
        BACKGROUND: model.background,
    }
    return ways.get(exchange.when, model.in_backward)()


class _Model:
    def __init__(self, profile: StepProfile, cluster: Cluster, exchange: Exchange, cuts: Cuts) -> None:
        self.profile = profile
        self.cluster = cluster
        self.exchange = exchange
        self.cuts = cuts
        memory = profile.bytes / profile.speeds.memory
        self.before_s, self.after_s = exchange.before * memory, exchange.after * memory
        self.forward_s, self.backward_s = profile.forward_ns / 1e9, profile.backward_ns / 1e9
        self.rest_s = profile.rest_ns / 1e9

    def cost(self, nbytes: float, dtype: str) -> Cost:
        """Returns the cost of one exchange of so many bytes, also if ranks make pairs."""
        coding = self.exchange.coding if dtype == "float32" else None  # codecs encode float32 alone
        found = bucket_cost(nbytes, self.cluster, self.profile.speeds, coding, self.exchange.pattern)
        if self.exchange.pattern != PAIR or self.exchange.hosts_pair or self.cluster.hosts == 1:
            return found
        return self._pairs_of_ranks(nbytes, coding)

    def _pairs_of_ranks(self, nbytes: float, coding: Coding | None) -> Cost:
        """Returns the cost if each rank of the host has a message for a rank elsewhere: they share the wire."""
        hosts, ranks = self.cluster.hosts, self.cluster.ranks
        alone = bucket_cost(nbytes, Cluster(self.cluster.network, hosts), self.profile.speeds, coding, PAIR)
        copies = ranks // self.cluster.island_size  # of the model, on a host
        far = ranks * (hosts - 1) * copies / (hosts * copies - 1)  # of the host's ranks, in the mean
        return Cost(alone.sent_bytes * far, alone.hold_s * max(1.0, far), alone.tail_s, alone.work_s * far)

    def whole(self) -> Cost:
        """Returns the cost of all buckets one after the other."""
        found = NOTHING
        place = {parameter.name: parameter for parameter in self.profile.parameters}
        for names in self.cuts:
            first = place[names[0]]
            found = _then(found, self.cost(sum(place[name].bytes for name in names), first.dtype))
        return found

    def slowed(self, cost: Cost, beside_s: float) -> float:
        """Seconds by which ``beside_s`` of computation take longer while that is exchanged."""
        # An exchange after the computation does not slow it down.
        share = min(1.0, beside_s / cost.hold_s) if cost.hold_s else 1.0
        return slowed_by(cost.work_s * share, self.profile, self.cluster)

    def in_backward(self) -> Prediction:
        found = predict_cuts(self.profile, self.cluster, self.cuts, self.exchange.coding)
        return replace(found, step_s=found.step_s + self.before_s + self.after_s)

    def thin(self) -> Prediction:
        """P while backward computes, Q after it; the passes over the gradients are the rank's own."""
        backward = backward_of(self.profile, self.cluster, None)
        place = {parameter.name: number for number, parameter in enumerate(self.profile.parameters)}
        first, second = [], []
        done = 0.0
        for names in self.cuts:
            parameters = [self.profile.parameters[place[name]] for name in names]
            done += sum(one.bytes for one in parameters)
            # Passes over gradients of all buckets before it delay a bucket, too.
            late = self.before_s * done / max(1, self.profile.bytes)
            ready = max(backward.ready_s[place[name]] for name in names) + late
            left, right = self._thin_bytes(parameters)
            first.append(Bucket(ready, bucket_cost(left, self.cluster, self.profile.speeds)))
            second.append(bucket_cost(right, self.cluster, self.profile.speeds))
        alone = self.backward_s + self.before_s
        line = timeline(first, alone)
        later = [Bucket(0.0, cost) for cost in second]
        after = timeline(later, 0.0)
        step = self.forward_s + self.rest_s + line.end_s + after.end_s + self.after_s
        return Prediction(step, line.end_s - alone + after.end_s, line.sent_bytes + after.sent_bytes)

    def _thin_bytes(self, parameters: Sequence[Gradient]) -> tuple[float, float]:
        """Bytes of P (with gradients that travel as they are) and of Q."""
        left = right = 0.0
        for one in parameters:
            columns = one.numel // one.rows if one.rows else 0
            rank = min(self.exchange.rank, one.rows, columns)
            item = one.bytes / one.numel if one.numel else 0
            # The rule of PowerSGD: what it would hardly make smaller travels as it is.
            if (one.rows + columns) * rank * self.exchange.min_compression_rate >= one.numel:
                left += one.bytes
            else:
                left += item * one.rows * rank
                right += item * columns * rank
        return left, right

    def beside(self) -> Prediction:
        """Weights travel from the start of forward to the end of backward, in one bucket per dtype."""
        sizes: dict[str, int] = {}
        for parameter in self.profile.parameters:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.bytes
        cost = NOTHING
        for dtype, nbytes in sizes.items():
            cost = _then(cost, self.cost(nbytes, dtype))
        window = self.forward_s + self.backward_s
        window += self.slowed(cost, window)
        exposed = max(0.0, cost.hold_s + cost.tail_s - window)
        extra = self.before_s + self.after_s + exposed + window - self.forward_s - self.backward_s
        return self._mean(extra, exposed, cost.sent_bytes)

    def after(self) -> Prediction:
        """Weights travel between two steps, and all wait."""
        cost = self.whole()
        exposed = cost.hold_s + cost.tail_s
        return self._mean(self.before_s + self.after_s + exposed, exposed, cost.sent_bytes)

    def streamed(self) -> Prediction:
        """Fragments travel while ``overlap`` steps go by."""
        whole = self.whole()
        parts = self.exchange.fragments
        hold = whole.hold_s / parts + whole.tail_s  # each fragment has a tail of its own
        exposed = parts * max(0.0, hold - self.exchange.overlap * self.profile.compute_s)
        room = parts * min(hold, self.exchange.overlap * self.profile.compute_s)
        slowed = self.slowed(whole, room)
        return self._mean(self.before_s + self.after_s + exposed + slowed, exposed, whole.sent_bytes)

    def background(self) -> Prediction:
        """Averages follow each other, with a pause; a rank looks after them at the beginning of a step."""
        cost = self.whole()
        step = self.profile.compute_s
        lasts = max(cost.hold_s + cost.tail_s + self.before_s + self.after_s, self.exchange.pause_s)
        steps = max(1, math.ceil(lasts / step)) if step else 1
        slowed = self.slowed(cost, steps * step)
        extra = (self.before_s + self.after_s + slowed) / steps
        return Prediction(step + extra, 0.0, cost.sent_bytes / steps)

    def _mean(self, extra_s: float, exposed_s: float, sent_bytes: float) -> Prediction:
        """Returns the mean over the steps of an interval, one of which exchanges."""
        interval = self.exchange.interval
        return Prediction(self.profile.compute_s + extra_s / interval, exposed_s / interval, sent_bytes / interval)


def _then(first: Cost, second: Cost) -> Cost:
    return Cost(
        first.sent_bytes + second.sent_bytes,
        first.hold_s + second.hold_s,
        max(first.tail_s, second.tail_s),
        first.work_s + second.work_s,
    )
