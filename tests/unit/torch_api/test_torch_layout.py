"""Which parameters are trained, how they are grouped and described, and how differences are told."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagua.base.errors import BaguaError
from bagua.torch_api.comm.plain_data import decode, encode
from bagua.torch_api.job.progress import figures
from bagua.torch_api.job.statistics import RecentSteps, StatisticsRecorder, StepTimes, union_length
from bagua.torch_api.step.parameters import (
    canonical,
    check_descriptions,
    describe,
    ignored_names,
    shared_state,
    trainable_parameters,
)
from bagua.torch_api.train.grouping import group_tensors

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@given(st.lists(st.tuples(st.integers(1, 200), st.sampled_from(DTYPES))), st.integers(1, 2000), st.integers(1, 2000))
def test_groups(sizes, limit, first):
    tensors = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes]
    order = {id(tensor): index for index, tensor in enumerate(tensors)}
    groups = group_tensors(tensors, limit, first)
    numbers = [[order[id(tensor)] for tensor in group] for group in groups]
    assert sorted(number for group in numbers for number in group) == list(range(len(tensors)))  # each once
    assert [group[-1] for group in numbers] == sorted(group[-1] for group in numbers)  # in the order of completion
    for group, members in zip(groups, numbers, strict=True):
        assert members == sorted(members)
        assert len({tensor.dtype for tensor in group}) == 1
        assert len(group) == 1 or sum(tensor.nbytes for tensor in group) <= limit
    if groups:  # the first to be closed is small; the last of a dtype may end up before it
        assert any(len(group) == 1 or sum(tensor.nbytes for tensor in group) <= first for group in groups)
    for dtype in DTYPES:  # no two neighbours of one dtype would have fitted together
        sums = [sum(tensor.nbytes for tensor in group) for group in groups if group[0].dtype is dtype]
        firsts = [group[0].nbytes for group in groups if group[0].dtype is dtype]
        assert all(held + next_one > min(limit, first) for held, next_one in zip(sums, firsts[1:], strict=False))
        assert sum(held + one <= limit for held, one in zip(sums, firsts[1:], strict=False)) <= 1  # the first bucket


@given(st.lists(st.integers(1, 200)), st.integers(1, 2000), st.integers(1, 2000))
def test_filled_groups_are_ddps(sizes, limit, first):
    tensors = [torch.empty(size, device="meta") for size in sizes]
    wanted = [[]]
    held = 0
    for tensor in tensors:
        wanted[-1].append(tensor)
        held += tensor.nbytes
        if held >= (limit if len(wanted) > 1 else min(limit, first)):
            wanted.append([])
            held = 0
    found = group_tensors(tensors, limit, first, filled=True)
    assert [len(one) for one in found] == [len(one) for one in wanted if one]


def model():
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    made.register_parameter("top", nn.Parameter(torch.zeros(2)))
    return made


def names(module):
    return [name for name, _ in trainable_parameters(module, ignored_names(module))]


def test_trainable_parameters():
    made = model()
    assert names(made) == ["top", "0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]
    made[2].weight.requires_grad_(False)
    made[1].bias.expert = True
    made[1].weight = made[0].bias
    made._ddp_params_and_buffers_to_ignore = ["0.weight"]
    made._bagua_params_and_buffers_to_ignore = [".top"]
    assert names(made) == ["0.bias", "2.bias"]
    state = [name for name, _ in shared_state(made, ignored_names(made))]
    assert state == ["0.bias", "2.weight", "2.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def description(module, **settings):
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    return canonical(describe(shared_state(module, frozenset()), names(module), optimizers, settings))


def test_descriptions_that_agree():
    check_descriptions([description(model()), description(model())])


def differing(change):
    made = model()
    if change == "shape":
        made[2] = nn.Linear(4, 3)
    if change == "strides":
        made[0].weight = nn.Parameter(torch.zeros(3, 4).t())
    if change == "error":
        return canonical({"error": "it broke"})
    return description(made, bucket=1 if change == "settings" else 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", ["2.weight float32 [2, 4]", "2.weight float32 [3, 4]", "rank 0", "rank 2"]),
        ("strides", ["strides [3, 1]", "strides [1, 4]"]),
        ("settings", ["settings differ", "{'bucket': 1}"]),
        ("error", ["rank 2: it broke"]),
    ],
)
def test_the_first_difference_is_told(change, words):
    fine = description(model(), bucket=0)
    with pytest.raises(BaguaError) as told:
        check_descriptions([fine, fine, differing(change)])
    assert all(word in str(told.value) for word in words), told.value


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans() | st.none(), inner)
    ),
)


@given(VALUES)
def test_plain_state_survives(value):
    assert decode(json.loads(json.dumps(encode(value, []))), []) == value


def test_tensors_in_state_are_made_anew():
    like = torch.zeros(2, 3).t()
    state = {"step": torch.tensor(3.0), "m": torch.ones(3, 2, dtype=torch.float64), "old": [None, torch.zeros(0)]}
    sent = []
    made = []
    found = decode(json.loads(json.dumps(encode(state, sent))), made, like)
    assert [tuple(tensor.shape) for tensor in sent] == [(), (3, 2), (0,)]
    assert found["m"] is made[1] and made[1].dtype is torch.float64 and made[1].stride() == like.stride()
    assert found["old"][0] is None and found["step"].shape == ()
    with pytest.raises(TypeError, match="object"):
        encode({"what": object()}, [])
    with pytest.raises(BaguaError, match="unknown dtype"):
        decode({"tensor": ["nn", []]}, [])


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20))), st.integers(0, 60), st.integers(0, 40))
def test_union_of_intervals(pairs, begin, length):
    intervals = [(start, start + size) for start, size in pairs]
    covered = {moment for start, end in intervals for moment in range(start, end)}
    inside = covered & set(range(begin, begin + length))
    assert union_length(intervals, begin, begin + length) == (len(covered), len(inside))


COUNTERS = {"bytes_local": 1, "bytes_sent": 2, "bytes_received": 3}


def test_time_of_steps_divides():
    recorder = StatisticsRecorder()
    assert recorder.summary(COUNTERS).last_step is None and figures(recorder.last_step()) == {}
    second = 10**9
    recorder.begin_step(10 * second)
    recorder.begin_step(11 * second)  # a second forward pass of the same step
    # Two overlapping operations, 14 to 18; the rank waits from 16 to 19, the last second of it for nobody.
    recorder.add_step([(0, 14 * second, 17 * second), (0, 15 * second, 18 * second)], 16 * second, 19 * second)
    assert recorder.last_step() == StepTimes(compute_seconds=7.0, exposed_seconds=2.0, hidden_seconds=2.0)
    assert recorder.last_step().step_seconds == 9.0
    assert figures(recorder.last_step()) == {"comm exposed ms": 2000, "comm hidden ms": 2000, "compute ms": 7000}
    recorder.begin_step(20 * second)  # has begun where the last one ended
    recorder.add_step([(0, 21 * second, 22 * second)], 21 * second, 22 * second)
    assert recorder.last_step() == StepTimes(2.0, 1.0, 0.0)
    found = recorder.summary(COUNTERS)
    assert (found.steps, found.compute_seconds, found.exposed_seconds, found.hidden_seconds) == (2, 9.0, 3.0, 2.0)
    assert (found.comm_seconds, found.hidden_share) == (5.0, 1 - 3 / 5)


MS = 1_000_000


def test_what_a_recent_step_waited_for():
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
