"""Settings of autotuning, and the cut that the model of a step proposes."""

from __future__ import annotations

import pytest

from bagua.base.errors import ConfigError
from bagua.base.job_options import variables
from bagua.tuning.decision import text
from bagua.tuning.options import wanted
from bagua.tuning.partition import in_order
from bagua.tuning.profile import Gradient, StepProfile
from bagua.tuning.space import space_of


def test_nothing_is_tuned_unless_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_AUTOTUNE", raising=False)
    assert wanted(None, None) is None
    assert wanted(True, None) is not None
    for word in ("0", "", "false", "off"):
        monkeypatch.setenv("BAGUA_AUTOTUNE", word)
        assert wanted(None, {"codec": ["fp16"]}) is None  # ready for the day on which it is set
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    assert wanted(None, None) is not None and wanted(False, None) is None
    assert variables({"autotune": True}) == {"BAGUA_AUTOTUNE": "1"} and variables({"autotune": False}) == {}


def test_names_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_AUTOTUNE_MAX_SAMPLES", "7")
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "2.5")
    monkeypatch.setenv("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", "0.5")
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    found = wanted(True, None)
    assert found is not None and not found.logs
    assert (found.limits.samples, found.limits.warm_up_s, found.limits.confidence_s) == (7, 2.5, 0.5)
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "1")
    found = wanted(True, None)
    assert found is not None and found.logs
    for wrong in ("x", "-1", "inf", "nan"):
        monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", wrong)
        with pytest.raises(ConfigError, match="BAGUA_AUTOTUNE_WARMUP_TIME_S"):
            wanted(True, None)


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ({"algorithm": ["qadam"]}, "can't be tuned"),
        ({"codec": "fp16"}, "a list of values"),
        ({"codec": []}, "at least one"),
        ({"codec": ["zip"]}, "zip"),
        ({"codec": [3]}, "names of codecs"),
        ({"bucket_kib": [0]}, "whole number"),
        ({"bucket_kib": [True]}, "whole number"),
        ({"chunk_kib": [1 << 20]}, "whole number"),
    ],
)
def test_values_that_cannot_be_tuned(tune: dict[str, list[object]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wanted(True, tune)


def test_tune_without_autotune() -> None:
    with pytest.raises(ConfigError, match="autotune=True"):
        wanted(False, {"codec": [None]})
    found = wanted(True, {"codec": [None, "minmax8"], "bucket_kib": [1024]})
    assert found is not None and found.given == {"codec": ("none", "minmax8"), "bucket_kib": ("1024",)}


def test_words_and_sizes() -> None:
    assert text({}) == "the defaults"
    assert text({"cuts": "1,2,3", "codec": "fp16"}) == "codec=fp16, cuts=1,2,3"
    assert text({"cuts": ",".join("1" * 40)}) == "cuts=40 buckets"


def test_the_space_follows_the_model_and_the_hosts() -> None:
    (small,) = space_of(1000, 1, {}, with_codec=True)
    assert small.name == "bucket_kib" and small.choices == ("256",)
    sizes, chunks, codec = space_of(1500 << 10, 2, {"codec": ["fp16", "none"]}, with_codec=True)
    assert sizes.choices == ("256", "512", "1024", "2048") and chunks.name == "chunk_kib"
    assert codec.choices == ("fp16", "none") and not codec.ordered
    assert len(space_of(1500 << 10, 2, {"codec": ["fp16"]}, with_codec=False)) == 2


def test_a_profile_in_the_order_of_buckets() -> None:
    """Nothing is ready before its turn."""
    came = [Gradient("b", "float32", 4, 10), Gradient("a", "float32", 4, 20), Gradient("c", "float32", 4, 30)]
    profile = StepProfile(tuple(came), 1, 40, 1, 1, 2, 2, 1, 5)
    found = in_order(profile, ["a", "b", "c"])
    assert [(one.name, one.ready_ns) for one in found.parameters] == [("a", 20), ("b", 20), ("c", 30)]
