"""Recorded profiles: what comes back from JSON, and what is refused with which words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua.base.errors import ConfigError
from bagua.tuning.profile import ITEM_BYTES, BucketCost, CodecSpeed, Gradient, Speeds, StepProfile

SPEEDS = Speeds(1e9, 2e9, 3e9, 1e-4, {"fp16": CodecSpeed(4e9, 5e9)})
PROFILE = StepProfile(
    (Gradient("b.bias", "float32", 10, 5), Gradient("a.weight", "bfloat16", 600, 50, rows=20)),
    *(1000, 2000, 3000),
    hosts=2,
    ranks_per_host=3,
    cores=4,
    threads=2,
    steps=7,
    buckets=(BucketCost(1240, 0.5, 0.25),),
    speeds=SPEEDS,
)


def test_there_and_back(tmp_path):
    assert StepProfile.from_json(PROFILE.to_json()) == PROFILE
    PROFILE.save(tmp_path / "p.json")
    assert StepProfile.load(tmp_path / "p.json") == PROFILE
    assert [path.name for path in tmp_path.iterdir()] == ["p.json"]
    assert (PROFILE.bytes, PROFILE.compute_s) == (1240, 6e-6)


def document(**changes):
    return json.dumps({**json.loads(PROFILE.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        ("[1]", "is no step profile"),
        ("{}", "is no step profile"),
        (document(version=2), "version 2, and this Bagua reads version 1"),
        (document(parameters=3), "damaged .*record it again"),
        (document(parameters=[]), "at least one parameter"),
        (document(parameters=[3]), "damaged"),
        (document(parameters=[{"name": "a"}]), "damaged .*'dtype'"),
        (document(forward_ns="3"), "damaged"),
        (document(backward_ns=-1), "backward_ns .* must not be negative"),
        (document(hosts=0), "hosts .* at least 1"),
        (document(more=0), "damaged .*'more'"),
        (document(speeds={"reduce": 1.0}), "damaged .*'memory'"),
        (document(speeds={"reduce": 0, "memory": 1, "socket": 1, "operation_s": 1}), "reduce .* positive"),
        (document(buckets=[{"bytes": 1, "wire_s": float("nan"), "exposed_s": 0.0}]), "bucket .* can't be"),
        (document(parameters=[{"name": "a", "dtype": "float3", "numel": 1, "ready_ns": 1}]), "float3.*Known"),
        (document(parameters=[{"name": "a", "dtype": "int8", "numel": 1, "ready_ns": 1}] * 2), "twice"),
        (document(parameters=[{"name": "a", "dtype": "int8", "numel": -1, "ready_ns": 1}]), "can't be"),
    ],
)
def test_garbage_is_refused_with_words(text, words):
    with pytest.raises(ConfigError, match=f"(?s)^here.*{words}"):
        StepProfile.from_json(text, "here")


@given(st.text() | st.recursive(st.none() | st.integers() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_any_text_is_read_or_refused(text):
    with pytest.raises(ConfigError):
        StepProfile.from_json(text)


def test_sizes_of_dtypes_are_those_of_torch():
    import torch

    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == ITEM_BYTES
