"""Helpers of the original's interface."""

import pytest
import torch

from bagua.torch_api import utils


def test_flatten_and_back():
    tensors = [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.arange(8.0, 12.0).view(2, 2).t()]
    flat = utils.flatten(tensors)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 10, 9, 11]
    for tensor, view in zip(tensors, utils.unflatten(flat, tensors), strict=True):
        assert torch.equal(tensor, view) and view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    with pytest.raises(ValueError, match="nothing to flatten"):
        utils.flatten([])
    with pytest.raises(ValueError, match="10 elements"):
        utils.unflatten(flat[:10], tensors)


def test_average_without_extremes():
    mean, deviation, kept = utils.average_by_removing_extreme_values([1000, 1000, 1000, 10, 11, 9, 10, 500, 10])
    assert kept and max(kept) < 500 and mean == pytest.approx(10, abs=1) and deviation < 1
    assert utils.average_by_removing_extreme_values([5.0]) == (5.0, 0.0, [5.0])
    assert utils.average_by_removing_extreme_values([0.0, 0.0])[0] == 0.0
    with pytest.raises(ValueError, match="no measurement"):
        utils.average_by_removing_extreme_values([])


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_average_over_time():
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
