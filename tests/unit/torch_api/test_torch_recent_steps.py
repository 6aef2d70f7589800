"""Averages of what recent steps waited for."""

from bagua.torch_api.job.statistics import RecentSteps, StatisticsRecorder

MS = 1_000_000


def test_one_step():
    """It waits from 16 to 26 ms: 3 ms for ranks of its host, then for exchange 1 until 20, and exchange 2 until 26."""
    recorder = StatisticsRecorder()
    assert recorder.recent.shares() is None
    recorder.begin_step(6 * MS)
    recorder.add_step([(0, 19 * MS, 20 * MS), (0, 15 * MS, 15 * MS), (0, 20 * MS, 26 * MS)], 16 * MS, 26 * MS)
    found = recorder.recent.shares()
    assert (found.compute_ms, found.ranks_ms, found.exposed_ms, found.hidden_ms) == (10, 3, 7, 0)
    assert (found.exchange, found.exchanges) == (3, 3)


def test_another_number_of_exchanges_begins_anew():
    recent = RecentSteps()
    recent.add([(0, 0, 9 * MS), (0, 0, 10 * MS)], 0, 10 * MS, (MS, 10 * MS, 0))
    recent.add([(0, 0, MS), (0, 0, 2 * MS), (0, 0, 9 * MS)], 0, 9 * MS, (MS, 9 * MS, 0))
    found = recent.shares()
    assert found is not None and (found.exchange, found.exchanges) == (3, 3)
