"""Traces as values: parts become one, clocks are applied, and the document is one that Perfetto takes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig.timelines import assert_perfetto_takes, events_of

from bagua.timeline.chrome import step_of, to_chrome
from bagua.timeline.shares import StepShare, step_words, straggler_words
from bagua.timeline.trace import ENGINE, Clock, Source, Span, Trace


def two_hosts():
    """Rank 1's clock is 1 ms behind the coordinator's."""
    trace = Trace("job-1", 1, clocks={"a": Clock(), "b": Clock(1_000_000, 40_000)})
    trace.add(Source("b", 1, spans=[Span("step", "step 0", 500_000, 900_000), Span("forward", "", 500_000, 600_000)]))
    trace.add(Source("b", ENGINE, hosts=("a", "b"), spans=[Span("host", "bucket 0", 610_000, 700_000, peer=0)]))
    trace.add(Source("a", 0, spans=[Span("step", "step 0", 1_400_000, 1_900_000)]))
    bucket = [Span("bucket", "bucket 10", 1_500_000, 1_800_000), Span("ready", "bucket 10", 1_500_000, 1_510_000)]
    trace.add(Source("a", 0, spans=bucket, missing="rank 0 recorded 1 of 2 steps"))
    trace.add(Source("a", ENGINE, hosts=("a", "b"), dropped=3))
    return trace


def test_all_sources_come_on_one_clock():
    document = to_chrome(two_hosts())
    assert_perfetto_takes(document)
    (first,), (step, forward) = (
        events_of(document, "rank 0 (a)", "training"),
        events_of(document, "rank 1 (b)", "training"),
    )
    assert (first["ts"], first["dur"]) == (0, 500)  # the earliest
    assert (step["ts"], step["dur"], forward["dur"]) == (100, 400, 100)  # 500 µs and 1 ms, after 1.4 ms
    assert events_of(document, "host b", "operations")[0]["name"] == "waits for host a"
    assert document["otherData"]["clock_bound_us"] == {"a": 0, "b": 40}
    assert document["otherData"]["missing"] == ["rank 0 recorded 1 of 2 steps", "host a had no room for 3 spans"]


def test_one_step_of_a_trace():
    spans = [Span("step", f"step {n}", 1000 * n, 1000 * n + 1000, n) for n in range(3)]
    trace = Trace(
        "job-1", 3, [Source("a", 0, spans=spans), Source("a", ENGINE, spans=[Span("reduce", "x", 2500, 2600)])]
    )
    document = step_of(to_chrome(trace), 2)
    assert [e["name"] for e in document["traceEvents"] if e["ph"] == "X"] == ["reduce x", "step 2"]
    with pytest.raises(ValueError, match="no step 7"):
        step_of(to_chrome(trace), 7)


TIMES = st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(sorted)
OPERATIONS = st.lists(TIMES, max_size=12)


@given(OPERATIONS, OPERATIONS, OPERATIONS)
def test_any_engine_gives_threads_that_nest(operations, steps, messages):
    spans = [Span("operation", "x", begin, end, number) for number, (begin, end) in enumerate(operations)]
    spans += [Span("ranks", "x", begin, (begin + end) // 2, n, peer=1) for n, (begin, end) in enumerate(operations)]
    spans += [Span("reduce", "x", begin, end) for begin, end in steps]
    spans += [Span("send", "x", begin, end, peer=0) for begin, end in messages]
    assert_perfetto_takes(to_chrome(Trace("job-1", 1, [Source("a", ENGINE, spans=spans, hosts=("b",))])))


# ---- what a step waits for


def test_a_straggler_is_told_from_the_wire():
    """Rank 2 computes 20 ms longer, and each exchange takes 10 ms beyond that."""
    normal = StepShare(0, "a", compute=70, ranks=20, exposed=10, exchange=3, exchanges=7)
    slow = replace(normal, rank=2, node="b", compute=90, ranks=0)
    shares = [normal, replace(normal, rank=1), slow, replace(normal, rank=3, node="b")]
    assert step_words(shares) == (
        "75 % computation, 10 % waiting for the other host's bytes (exchange 3 of 7), 15 % waiting for rank 2"
    )
    assert straggler_words(shares) == "rank 2 on b computes 90.0 ms a step, the others 70.0 ms"


def test_the_host_that_is_waited_for_is_named():
    shares = [StepShare(0, "a", 80, 0, 20, 1, 1), StepShare(1, "b", 80, 0, 1, 1, 1)]
    assert "waiting for host b's bytes" in step_words(shares)
    mirrored = [StepShare(0, "a", 80, 0, 1, 1, 1), StepShare(1, "b", 80, 0, 20, 1, 1)]
    assert "waiting for host a's bytes" in step_words(mirrored)
    assert "waiting for other hosts' bytes" in step_words([*shares, StepShare(2, "c", 80, 0, 20)])


@given(st.lists(st.builds(StepShare, st.integers(0, 9), st.sampled_from("ab"), *[st.floats(0, 1e6)] * 3), max_size=5))
def test_shares_are_words_whatever_comes(shares):
    assert "nan" not in step_words(shares) + straggler_words(shares)
