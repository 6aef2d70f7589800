"""The past of a job's figures, bounded: points for charts and for a map of ranks over time. No clock, no locks."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from bagua.proto import common_pb2, job_pb2

MAX_POINTS = 480
MAX_SERIES = 12  # reported values that get a chart
MAX_ROWS = 128  # of the map; with more ranks several share a row
MAX_COLUMNS = 96
CARRIED_S = 8.0  # a rank that told nothing for so long has no cell
POINT_S = 0.5  # points are not closer than that at the beginning
SPEED_S = 2.0  # steps per second are counted over so long
SMOOTHING = 0.3  # weight of the newest report
STRAGGLES = 1.25  # a rank that computes so many times as long as the median is named
# Figures of the newest step, among the metrics of each report of a rank that trains.
EXPOSED, HIDDEN, COMPUTE = "comm exposed ms", "comm hidden ms", "compute ms"
_FIGURES = frozenset((EXPOSED, HIDDEN, COMPUTE))


@dataclass(frozen=True)
class Shares:
    """Shares of a step of one rank, in ms. ``ranks``: waits for other ranks of its host, 0 where it is not known and
    part of ``compute``. Hidden communication runs during ``compute``."""

    compute: float
    ranks: float
    exposed: float
    hidden: float


@dataclass(frozen=True)
class Report:
    """A report of a rank. ``own``: its program did, else the library by itself. Bytes are those of its host's engine
    since the job began there; None: it did not tell."""

    time: float
    rank: int
    node: str
    step: int
    total: int
    metrics: Mapping[str, float]
    own: bool = True
    message: str = ""
    shares: Shares | None = None
    bytes_inside: int | None = None
    bytes_between: int | None = None


@dataclass(frozen=True)
class Straggler:
    """``ms``: for so long it computes in a step; ``median``: of the others."""

    rank: int
    node: str
    ms: float
    median: float


class Point(NamedTuple):
    """``computes``: ms that each rank computes in a step, by rank; NaN where it is not known."""

    time: float
    values: dict[str, float]
    computes: array[float]


class Thinned:
    """Points in the order of time. When there are too many, every second one goes, and later ones are taken half as
    often: so the whole past stays visible. ``version`` changes when points went."""

    def __init__(self, most: int = MAX_POINTS, gap_s: float = POINT_S) -> None:
        self._most, self.gap_s = most, gap_s
        self.points: list[Point] = []
        self.version = 0

    def due(self, time: float) -> bool:
        """Returns False if it is too soon after the last point."""
        return not self.points or time - self.points[-1].time >= self.gap_s

    def add(self, point: Point) -> None:
        self.points.append(point)
        if len(self.points) > self._most:
            self.points = self.points[::2]
            self.gap_s *= 2
            self.version += 1


@dataclass
class _Engine:
    time: float
    inside: int
    between: int


@dataclass
class History:
    """History of one job. ``add`` reports in the order of their coming; ``forget_ranks`` in each new generation."""

    points: Thinned = field(default_factory=Thinned)
    latest: dict[int, Report] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # of reported values, in the order of their coming
    version: int = 0  # of anything
    _engines: dict[str, _Engine] = field(default_factory=dict)
    _rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    _computes: dict[int, float] = field(default_factory=dict)  # of each rank, averaged over some reports
    _lead: tuple[bool, int] | None = None  # the program of that rank does not report; the rank
    _steps: tuple[float, int] | None = None
    _speed: float | None = None

    def add(self, report: Report) -> None:
        """A report of a rank. The same again, at another time, changes nothing."""
        old = self.latest.get(report.rank)
        if old is not None and replace(report, time=old.time) == old:
            return
        self.version += 1
        self.latest[report.rank] = report
        key = not report.own, report.rank
        self._lead = key if self._lead is None else min(self._lead, key)
        if report.shares is not None:
            before = self._computes.get(report.rank, report.shares.compute)
            self._computes[report.rank] = before + SMOOTHING * (report.shares.compute - before)
        self._count_bytes(report)
        if self._lead[1] == report.rank:
            self._count_steps(report)
            values = self._values(report)
            if self.points.due(report.time):
                self.points.add(Point(report.time, values, self._computes_at(report.time)))

    def forget_ranks(self) -> None:
        """Forgets figures of ranks, which have other numbers from now on."""
        self.latest.clear()
        self._computes.clear()
        self._engines.clear()
        self._rates.clear()
        self._lead = None
        self.version += 1

    def lead(self) -> Report | None:
        """The rank whose reported values are drawn: the first whose program reports, else the first."""
        return None if self._lead is None else self.latest[self._lead[1]]

    def straggler(self) -> Straggler | None:
        """The rank that computes clearly longer than the median of the others."""
        if len(self._computes) < 2:
            return None
        slowest = max(self._computes, key=self._computes.__getitem__)
        most = self._computes[slowest]
        median = statistics.median(compute for rank, compute in self._computes.items() if rank != slowest)
        return Straggler(slowest, self.latest[slowest].node, most, median) if most > STRAGGLES * median + 0.5 else None

    def _count_steps(self, report: Report) -> None:
        if self._steps is not None:
            time, step = self._steps
            if report.step < step:
                self._steps, self._speed = (report.time, report.step), None  # the program has begun anew
            elif report.time - time >= SPEED_S and report.step > step:
                self._speed = (report.step - step) / (report.time - time)
                self._steps = report.time, report.step
        else:
            self._steps = report.time, report.step

    def _count_bytes(self, report: Report) -> None:
        if report.bytes_inside is None or report.bytes_between is None or not report.node:
            return
        now = _Engine(report.time, report.bytes_inside, report.bytes_between)
        old = self._engines.get(report.node)
        if old is not None and report.time - old.time < SPEED_S and now.inside >= old.inside:
            return
        self._engines[report.node] = now
        if old is not None and now.inside >= old.inside and now.between >= old.between:  # less: the engine is a new one
            seconds = now.time - old.time
            self._rates[report.node] = (now.inside - old.inside) / seconds, (now.between - old.between) / seconds

    def _values(self, report: Report) -> dict[str, float]:
        for name in report.metrics:
            if name not in self.names and len(self.names) < MAX_SERIES:
                self.names.append(name)
        values = {f"m:{name}": value for name, value in report.metrics.items() if name in self.names}
        values["step"] = float(report.step)
        if self._speed is not None:
            values["speed"] = self._speed
        shares = [one.shares for one in self.latest.values() if one.shares is not None]
        if shares:
            # Hidden communication is a part of it.
            values["compute"] = _mean(shares, lambda one: max(0.0, one.compute - one.hidden))
            values["hidden"] = _mean(shares, lambda one: min(one.hidden, one.compute))
            values["exposed"] = _mean(shares, lambda one: one.exposed)
            values["ranks"] = _mean(shares, lambda one: one.ranks)
        if self._rates:
            values["inside"] = sum(inside for inside, _ in self._rates.values())
            values["between"] = sum(between for _, between in self._rates.values())
        return values

    def _computes_at(self, time: float) -> array[float]:
        """A rank that told nothing for a moment is as before."""
        found = array("f", [math.nan]) * (max(self.latest) + 1)
        for rank, report in self.latest.items():
            if report.shares is not None and time - report.time <= CARRIED_S:
                found[rank] = report.shares.compute
        return found

    # ---- documents

    def chart_document(self, since: float = float("-inf")) -> dict[str, Any]:
        """Points after ``since``, by columns. null: no value, or none that JSON has."""
        points = [point for point in self.points.points if point.time > since]
        names = sorted({name for point in points for name in point.values})
        return {
            "version": self.points.version,
            "gap": self.points.gap_s,
            "t": [round(point.time, 2) for point in points],
            "series": {name: [_number(point.values.get(name)) for point in points] for name in names},
        }

    def map_document(self, ranks: int) -> dict[str, Any]:
        """Rows by rank, columns by time; a row of several ranks has the largest of their values. null: not known."""
        points = self._told_by_most()
        columns = points[:: max(1, -(-len(points) // MAX_COLUMNS))]
        each = max(1, -(-ranks // MAX_ROWS))
        return {
            "begin": columns[0].time if columns else None,
            "width": (columns[-1].time - columns[0].time) / max(1, len(columns) - 1) if columns else POINT_S,
            "ranks_in_row": each,
            "rows": [
                [_largest(column.computes[first : first + each]) for column in columns]
                for first in range(0, ranks, each)
            ],
        }

    def _told_by_most(self) -> list[Point]:
        """Points from the one on at which half of the ranks told something: before somebody looked only one did."""
        told = [sum(map(math.isfinite, point.computes)) for point in self.points.points]
        most = max(told, default=0)
        first = next((at for at, count in enumerate(told) if count and 2 * count >= most), len(told))
        return self.points.points[first:]

    def now_document(self) -> dict[str, Any]:
        """The newest of all: what a page shows at once."""
        lead, late = self.lead(), self.straggler()
        return {
            "time": lead.time if lead else None,
            "step": lead.step if lead else None,
            "total": lead.total if lead else None,
            "message": lead.message if lead else "",
            "speed": _number(self._speed),
            "metrics": {name: _number(value) for name, value in list(lead.metrics.items())[:MAX_SERIES]}
            if lead
            else {},
            "straggler": late
            and {"rank": late.rank, "node": late.node, "ms": round(late.ms, 2), "median": round(late.median, 2)},
        }


def _mean(shares: list[Shares], pick: Callable[[Shares], float]) -> float:
    return statistics.fmean(pick(one) for one in shares)


def _largest(values: array[float]) -> float | None:
    found = [value for value in values if math.isfinite(value)]
    return round(max(found), 3) if found else None


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")


def report_of(progress: common_pb2.Progress, time: float, nodes: Mapping[int, str]) -> Report:
    """``time`` in seconds since the epoch; ``nodes``: the node of each rank."""
    metrics = dict(progress.metrics)
    told = progress.HasField("bytes")
    return Report(
        time=time,
        rank=progress.rank,
        node=nodes.get(progress.rank, ""),
        step=progress.step,
        total=progress.total,
        metrics={name: value for name, value in sorted(metrics.items()) if name not in _FIGURES},
        own=not progress.by_itself,
        message=progress.message,
        shares=shares_of(progress, metrics),
        bytes_inside=progress.bytes.inside if told else None,
        bytes_between=progress.bytes.between if told else None,
    )


def shares_of(progress: common_pb2.Progress, metrics: Mapping[str, float]) -> Shares | None:
    """Returns how a step divides; None if the rank does not train by backward passes. Averages of recent steps where
    the report has them, else those of the newest step, where waits for ranks of the host count as computation.
    """
    if progress.HasField("shares"):
        found = progress.shares
        return Shares(found.compute_ms, found.ranks_ms, found.exposed_ms, found.hidden_ms)
    if COMPUTE not in metrics:
        return None
    return Shares(metrics[COMPUTE], 0.0, metrics.get(EXPOSED, 0.0), metrics.get(HIDDEN, 0.0))


def last_reports(job: job_pb2.Job) -> list[common_pb2.Progress]:
    """The newest report of each rank as far as the coordinator tells, at least that of one."""
    return list(job.reports) or ([job.progress] if job.HasField("progress") else [])
