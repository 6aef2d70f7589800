"""Helpers of the original's interface."""

from __future__ import annotations

import math

import pytest
import torch

from bagua.torch_api import utils


def test_flatten_and_back() -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.arange(8.0, 12.0).view(2, 2).t()]
    flat = utils.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 10, 9, 11]
    for tensor, view in zip(tensors, utils.unflatten(flat, tensors), strict=True):
        assert torch.equal(tensor, view) and view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="nothing to flatten"):
        utils.flatten([])
    with pytest.raises(ValueError, match="10 elements"):
        utils.unflatten(flat[:10], tensors)


def test_calls_on_flat_tensors() -> None:
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.float64), torch.full((2, 2), 2.0)]
    seen: list[int] = []

    def double(flat: torch.Tensor, factor: float = 2.0) -> None:
        seen.append(flat.numel())
        flat *= factor

    utils.apply_flattened_call_all(tensors, double)
    assert seen == [6, 3]
    utils.apply_flattened_call(tensors[:1], double, (5.0,))
    assert tensors[0].tolist() == [10, 10] and tensors[1].tolist() == [2, 2, 2] and tensors[2][0, 0] == 4


def test_contiguous_in_memory() -> None:
    memory = torch.arange(10.0)
    assert utils.check_contiguous([memory[:3], memory[3:4], memory[4:]]) and utils.check_contiguous([])
    assert not utils.check_contiguous([memory[:3], memory[4:]])
    copy = utils.get_flattened_tensor([memory[:3], memory[5:]])
    assert copy.tolist() == [0, 1, 2, 5, 6, 7, 8, 9] and copy.data_ptr() != memory.data_ptr()


def test_names_of_dtypes() -> None:
    names = {torch.float32: "f32", torch.float16: "f16", torch.uint8: "u8", torch.int64: "i64", torch.bfloat16: "bf16"}
    assert {dtype: utils.to_bagua_datatype(dtype) for dtype in names} == names
    with pytest.raises(ValueError, match="complex64"):
        utils.to_bagua_datatype(torch.complex64)


def test_average_without_extremes() -> None:
    mean, deviation, kept = utils.average_by_removing_extreme_values([1000, 1000, 1000, 10, 11, 9, 10, 500, 10])
    assert kept and max(kept) < 500 and mean == pytest.approx(10, abs=1) and deviation < 1
    assert utils.average_by_removing_extreme_values([5.0]) == (5.0, 0.0, [5.0])
    assert utils.average_by_removing_extreme_values([0.0, 0.0])[0] == 0.0
    with pytest.raises(ValueError, match="no measurement"):
        utils.average_by_removing_extreme_values([])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_average_over_time() -> None:
    clock = Clock()
    average = utils.StatisticalAverage(clock=clock)
    assert average.get(10.0) == 0.0 and average.total_recording_time() == 0
    values = [float(1 + second % 7) for second in range(64)]
    for value in values:
        clock.now += 1.0
        average.record(value)
    assert average.total_recording_time() == pytest.approx(64)
    for seconds in (1, 2, 4, 8, 16, 32, 64):
        newest = values[-seconds:]
        # For times beyond a power of two seconds only means are kept.
        assert average.get_records_mean(seconds) == pytest.approx(sum(newest) / seconds, abs=1.0)
        assert average.get(seconds) == pytest.approx(average.get_records_mean(seconds))
    assert average.get_records_mean(1) == pytest.approx(values[-1])
    assert average.get_records_mean(64) == pytest.approx(sum(values) / 64, rel=1e-6)
    assert average.get_records_mean(1000) == pytest.approx(sum(values) / 64, rel=1e-6)
    clock.now += 100.0  # nothing measured since: the newest value counts on
    assert average.get(10.0) == pytest.approx(values[-1])


@pytest.mark.parametrize(
    ("seconds", "mean"),
    [(0.5, 6.0), (1, 6.0), (2, (6 + 5) / 2), (3, (6 + 4.5 * 2) / 3), (5, (6 + 3.5 * 4) / 5), (7, (6 + 2.5 * 6) / 7)],
)
def test_average_over_time_of_the_originals_records(seconds: float, mean: float) -> None:
    """Mean over the last second 5, over two 4.5, over four 3.5, over all six 2.5; then another second of 6."""
    clock = Clock()
    average = utils.StatisticalAverage(0.0, [5.0, 4.5, 3.5], (2.0, 2.5), clock)
    clock.now = 1.0
    average.record(6.0)
    assert average.get_records_mean(seconds) == pytest.approx(mean, abs=0.1)
    assert average.total_recording_time() == 7.0 and str(average.records) in str(average)


def test_average_over_time_of_slow_and_quick_measurements() -> None:
    clock = Clock()
    average = utils.StatisticalAverage(clock=clock)
    for passed, value in ((0.25, 4.0), (0.25, 8.0), (5.0, 1.0), (0.0, 99.0)):
        clock.now += passed
        average.record(value)
    assert average.total_recording_time() == pytest.approx(5.5)
    assert average.get_records_mean(4.0) == pytest.approx(1.0)
    assert average.get_records_mean(5.5) == pytest.approx((0.25 * 4 + 0.25 * 8 + 5) / 5.5)
    again = utils.StatisticalAverage(average.last_update_time, average.records, average.record_tail, clock)
    assert again.get_records_mean(5.5) == pytest.approx(average.get_records_mean(5.5))
    assert not math.isnan(again.get(0.5))
