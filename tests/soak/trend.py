"""Does a series of samples grow? Robust against bursts: the Theil-Sen slope and medians, never single values."""

import itertools
import statistics

WARM_UP = 0.25  # share of the time that is not judged: buffers grow to their working size
MOST = 200  # samples that are compared pair by pair


def growth(times, values):
    """By how much the values grew over the time after the warm-up: the smaller one of what the slope says (the median
    of the slopes of all pairs of samples; Sen 1968) and of what the medians of the first and last third say. 0 for a
    series that is too short."""
    begin = times[0] + WARM_UP * (times[-1] - times[0]) if times else 0.0
    judged = [(time, value) for time, value in zip(times, values, strict=True) if time >= begin]
    if len(judged) < 6:
        return 0.0
    third = len(judged) // 3
    step = statistics.median(v for _, v in judged[-third:]) - statistics.median(v for _, v in judged[:third])
    thinned = judged[:: -(-len(judged) // MOST)]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(thinned, 2) if b[0] > a[0]]
    return min(step, statistics.median(slopes) * (judged[-1][0] - judged[0][0]))
