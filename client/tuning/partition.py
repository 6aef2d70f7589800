"""The cut into buckets with the least exposed communication.

Merged-gradient wait-free backpropagation: Shi, Chu, Li, "MG-WFBP: Merging gradients wisely for efficient communication
in distributed deep learning", IEEE TPDS 2021 (INFOCOM 2019). Few gradients in a bucket start early, and many share the
cost of an operation. Their greedy merge is optimal where an operation costs a + b x bytes and nothing overlaps. In
our model (``predict.py``) delays overlap, the cost has corners (small operations take another way), and the last
bucket starts at the end of backward, so a dynamic program takes the greedy one's place: it is exact in the model.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from bagua.tuning.grouping import bucket_bytes, group
from bagua.tuning.network import Network
from bagua.tuning.predict import (
    Backward,
    Cluster,
    Coding,
    backward_of,
    bucket_cost,
    predict_cuts,
)
from bagua.tuning.profile import StepProfile

Cuts = list[list[str]]

MOST_PIECES = 256  # a model of more tensors is cut between some of them only: small neighbours count as one


def default_cuts(profile: StepProfile) -> Cuts:
    """The cut that training begins with: by bytes alone."""
    sizes = [(one.bytes, one.dtype) for one in profile.parameters]
    numbers = group(sizes, bucket_bytes(profile.bytes))
    return [[profile.parameters[number].name for number in members] for members in numbers]


def one_bucket(profile: StepProfile) -> Cuts:
    """Puts all parameters into one bucket, or into one for each dtype."""
    return _by_dtype(profile, range(len(profile.parameters)))


def one_per_tensor(profile: StepProfile) -> Cuts:
    """A bucket for each parameter."""
    return [[parameter.name] for parameter in profile.parameters]


def best_cuts(
    profile: StepProfile,
    network: Network,
    hosts: int | None = None,
    ranks: int | None = None,
    coding: Coding | None = None,
) -> Cuts:
    """Names of parameters, a list for each bucket, in the order in which buckets start: the cut of gradient all-reduce
    with the least exposed communication in the model.

    ``hosts``, ``ranks`` (of a host): those of the profile unless given. Buckets are runs of parameters in their order
    of arrival, of one dtype each. Exact for up to MOST_PIECES parameters; never worse than the default cut, one
    bucket, or one per tensor.
    """
    cluster = Cluster.of(profile, network, hosts, ranks)
    backward = backward_of(profile, cluster, coding)
    found = [
        _search(profile, cluster, backward, coding, _pieces(profile)),
        default_cuts(profile),
        one_bucket(profile),
        one_per_tensor(profile),
    ]

    # The second key: equal cuts differ in their number of buckets, and fewer are better.
    return min(found, key=lambda cuts: (predict_cuts(profile, cluster, cuts, coding).step_s, len(cuts)))


def _by_dtype(profile: StepProfile, numbers: Sequence[int]) -> Cuts:
    """The parameters with these numbers, a bucket for each dtype, in the order of first occurrence."""
    found: dict[str, list[str]] = {}
    for number in numbers:
        parameter = profile.parameters[number]
        found.setdefault(parameter.dtype, []).append(parameter.name)
    return list(found.values())


def _pieces(profile: StepProfile) -> list[int]:
    """Ends of pieces that are not cut: parameter numbers, ascending, the last one len(parameters)."""
    count = len(profile.parameters)
    if count <= MOST_PIECES:
        return list(range(1, count + 1))
    ends, held, least = [], 0, profile.bytes / MOST_PIECES
    for number, parameter in enumerate(profile.parameters, 1):
        held += parameter.bytes
        if held >= least or number == count:
            ends.append(number)
            held = 0
    return ends


@dataclass(frozen=True)
class _Label:
    """A way to cut the first pieces: when the wire is free and the last result is there, and where the last cut was."""

    free_s: float
    latest_s: float
    buckets: int
    begin: int
    before: _Label | None


def _search(
    profile: StepProfile, cluster: Cluster, backward: Backward, coding: Coding | None, ends: Sequence[int]
) -> Cuts:
    """Labels of the first k pieces, for k = 1, 2, ...: of those no other one is better than in every way."""
    dtypes = sorted({parameter.dtype for parameter in profile.parameters})
    sums = {dtype: [0] for dtype in dtypes}
    begin = 0
    for end in ends:  # sums from the first piece on: any run's bytes are a difference of two
        for dtype in dtypes:
            mine = (one.bytes for one in profile.parameters[begin:end] if one.dtype == dtype)
            sums[dtype].append(sums[dtype][-1] + sum(mine))
        begin = end

    @functools.cache  # the search asks for the same bytes again and again
    def cost(nbytes: int, dtype: str) -> tuple[float, float]:
        found = bucket_cost(nbytes, cluster, profile.speeds, coding if dtype == "float32" else None)
        return found.hold_s, found.tail_s

    count = len(ends)
    labels: list[list[_Label]] = [[_Label(0.0, 0.0, 0, 0, None)]]
    for last in range(1, count + 1):
        ready = backward.end_s if last == count else backward.ready_s[ends[last - 1] - 1]
        reached: list[_Label] = []
        for first in range(last):
            parts = [
                cost(sums[one][last] - sums[one][first], one) for one in dtypes if sums[one][last] > sums[one][first]
            ]
            for label in labels[first]:
                free, latest = max(label.free_s, ready), label.latest_s
                for hold, tail in parts:  # a run of several dtypes has a bucket for each
                    free += hold
                    latest = max(latest, free + tail)
                reached.append(_Label(free, latest, label.buckets + len(parts), first, label))
        labels.append(_best_of(reached))
    best = min(labels[count], key=lambda label: (label.latest_s, label.buckets))
    return _cuts_of(profile, best, ends)


def _best_of(labels: list[_Label]) -> list[_Label]:
    labels.sort(key=lambda label: (label.free_s, label.latest_s, label.buckets))
    kept: list[_Label] = []
    for label in labels:
        # One that is free later must be done sooner, or it is worse in every way.
        if not kept or label.latest_s < kept[-1].latest_s:
            kept.append(label)
    return kept


def _cuts_of(profile: StepProfile, label: _Label, ends: Sequence[int]) -> Cuts:
    found: list[Cuts] = []
    stop = len(ends)
    while label.before is not None:
        begin = ends[label.begin - 1] if label.begin else 0
        found.append(_by_dtype(profile, range(begin, ends[stop - 1])))
        stop, label = label.begin, label.before
    return [names for cuts in reversed(found) for names in cuts]


def as_text(cuts: Cuts) -> str:
    """The lengths of cuts, as a setting has them."""
    return ",".join(str(len(names)) for names in cuts)


def from_text(text: str, names: Sequence[str]) -> list[list[str]]:
    """The cuts of ``names`` that ``as_text`` wrote. Raises ValueError if the text does not cut these names."""
    found, begin = [], 0
    for count in map(int, text.split(",")):
        found.append(list(names[begin : begin + count]))
        begin += count
    if begin != len(names) or not all(found):
        raise ValueError(f"{text} does not cut {len(names)} parameters.")
    return found


def in_order(profile: StepProfile, arrival: Sequence[str]) -> StepProfile:
    """The same with parameters in this order: none is ready before those that come before it in a bucket's turn."""
    place = {name: number for number, name in enumerate(arrival)}
    ordered = sorted(profile.parameters, key=lambda one: place.get(one.name, len(place)))
    ready = itertools.accumulate((one.ready_ns for one in ordered), max)
    parameters = tuple(dataclasses.replace(one, ready_ns=at) for one, at in zip(ordered, ready, strict=True))
    return dataclasses.replace(profile, parameters=parameters)
