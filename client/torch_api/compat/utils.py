"""Helpers that programs written for the original import."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

BAGUA_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "bool",
}

WARM_UP_SHARE = 3  # one part in so many
MOST_ROUNDS = 11


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A new one-dimensional tensor with the elements of ``tensors``, one after the other. Raises ValueError for
    none."""
    if not tensors:
        raise ValueError("There is nothing to flatten: pass at least one tensor. [BG402]")
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of ``flat`` in the shapes of ``tensors``: the opposite of ``flatten``. Raises ValueError if ``flat`` is
    too short."""
    needed = sum(tensor.numel() for tensor in tensors)
    if flat.numel() < needed:
        raise ValueError(f"flat has {flat.numel()} elements, and the tensors have {needed} together. [BG402]")
    views = []
    begin = 0
    for tensor in tensors:
        views.append(flat[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
    return tuple(views)


def get_flattened_tensor(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """A copy of the elements of ``tensors``, one after the other, without history."""
    return flatten([tensor.detach() for tensor in tensors])


def apply_flattened_call(
    bucket: Sequence[torch.Tensor], call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Calls ``call(flat, *extra_args)`` with all elements of ``bucket`` in one tensor, and copies the results back.
    All must have one dtype. With ``torch.distributed.all_reduce`` the sum becomes the mean."""
    with torch.no_grad():
        flat = get_flattened_tensor(bucket)
        call(flat, *(extra_args or ()))
        if call is dist.all_reduce:
            flat /= dist.get_world_size()  # as in the original
        for tensor, result in zip(bucket, unflatten(flat, bucket), strict=True):
            tensor.copy_(result)


def apply_flattened_call_all(tensors: Sequence[torch.Tensor], call: Callable[..., Any]) -> None:
    """``apply_flattened_call`` for each dtype among ``tensors``, in the order in which they first come."""
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    for group in groups.values():
        apply_flattened_call(group, call)


def check_contiguous(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns True if each tensor begins in memory where the one before it ends."""
    expected = None
    for tensor in tensors:
        if expected is not None and tensor.data_ptr() != expected:
            return False
        expected = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return True


def to_bagua_datatype(datatype: torch.dtype) -> str:
    """The original's short name of a dtype, "f32" for example. Raises ValueError for one that can't be communicated."""
    if datatype not in BAGUA_DTYPES:
        raise ValueError(f"{datatype} can't be communicated. Supported: {', '.join(map(str, BAGUA_DTYPES))}. [BG401]")
    return BAGUA_DTYPES[datatype]


def average_by_removing_extreme_values(raw_score_list: Sequence[float]) -> tuple[float, float, list[float]]:
    """Mean and standard deviation of measurements without warm-up and outliers, and those that were kept.

    The first third is left out as warm-up. Of the rest, values a standard deviation or more from the mean are left
    out; again, at most ten times, while the deviation is not below the mean. Raises ValueError for an empty list.
    """
    if not raw_score_list:
        raise ValueError("There is no measurement to average. [BG402]")
    kept = [float(score) for score in raw_score_list[len(raw_score_list) // WARM_UP_SHARE :]]
    for _ in range(MOST_ROUNDS):
        mean, deviation = statistics.fmean(kept), statistics.pstdev(kept)
        # Equal values have no deviation: all are kept then.
        kept = [score for score in kept if abs(score - mean) < deviation] or kept
        if statistics.pstdev(kept) < statistics.fmean(kept):
            break
    return statistics.fmean(kept), statistics.pstdev(kept), kept


class StatisticalAverage:
    """The mean over time of a quantity that is measured now and then, over the last 1, 2, 4, ... seconds.

    Each measurement stands for the time since the one before it. Between two spans whose means are kept, the mean is
    interpolated. The public attributes are those that the original sends between processes.

    Args:
        last_update_time: Seconds since the epoch of the last measurement. Default: now.
        records: Mean over the last 2^i seconds, for i = 0, 1, ...
        record_tail: (seconds beyond the longest of these spans, mean over the whole time).
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        last_update_time: float | None = None,
        records: Sequence[float] = (),
        record_tail: tuple[float, float] = (0.0, 0.0),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self.last_update_time = clock() if last_update_time is None else last_update_time
        self.records = list(records)
        self.record_tail = (float(record_tail[0]), float(record_tail[1]))

    def record_seconds(self) -> float:
        """Seconds that ``records`` cover."""
        return 2.0 ** (len(self.records) - 1) if self.records else 0.0

    def total_recording_time(self) -> float:
        """Seconds covered altogether."""
        return self.record_seconds() + self.record_tail[0]

    def get_records_mean(self, last_n_seconds: float) -> float:
        """Mean over the last ``last_n_seconds`` seconds before the last measurement, as far back as is known; 0.0 if
        nothing is."""
        if last_n_seconds <= 0:
            return 0.0
        kept = [(2.0**number, mean) for number, mean in enumerate(self.records)]
        if self.record_tail[0] > 0:
            kept.append((self.total_recording_time(), self.record_tail[1]))
        for (near, newer), (far, whole) in itertools.pairwise([(0.0, kept[0][1]), *kept] if kept else []):
            if last_n_seconds <= far:
                return newer + (whole - newer) * (last_n_seconds - near) / (far - near)
        return kept[-1][1] if kept else self.record_tail[1]

    def record(self, val: float) -> None:
        """``val`` was the value since the last measurement until now."""
        now = self._clock()
        passed = now - self.last_update_time
        if passed <= 0:  # the clock may have been set back
            return

        def mean(seconds: float) -> float:
            older = max(0.0, seconds - passed)
            return (val * (seconds - older) + self.get_records_mean(older) * older) / seconds

        total = self.total_recording_time() + passed
        records: list[float] = []
        while 2.0 ** len(records) <= total:
            records.append(mean(2.0 ** len(records)))
        whole = mean(total)
        self.last_update_time, self.records = now, records
        self.record_tail = (total - self.record_seconds(), whole)

    def get(self, last_n_seconds: float) -> float:
        """Mean over the part of the last ``last_n_seconds`` seconds that the last measurement ends; the newest value
        if that is older."""
        silent = max(0.0, self._clock() - self.last_update_time)
        return self.get_records_mean(last_n_seconds - silent if last_n_seconds > silent else 1.0)

    def __str__(self) -> str:
        shown = ("last_update_time", "records", "record_tail")
        return str({name: getattr(self, name) for name in shown})
