"""Settings of autotuning, and the cut that the model of a step proposes."""

from bagua.base.job_options import variables
from bagua.tuning.options import wanted
from bagua.tuning.space import space_of


def test_nothing_is_tuned_unless_somebody_says_so(monkeypatch):
    monkeypatch.delenv("BAGUA_AUTOTUNE", raising=False)
    assert wanted(None, None) is None
    assert wanted(True, None) is not None
    for word in ("0", "", "false", "off"):
        monkeypatch.setenv("BAGUA_AUTOTUNE", word)
        assert wanted(None, {"codec": ["fp16"]}) is None  # ready for the day on which it is set
    monkeypatch.setenv("BAGUA_AUTOTUNE", "1")
    assert wanted(None, None) is not None and wanted(False, None) is None
    assert variables({"autotune": True}) == {"BAGUA_AUTOTUNE": "1"} and variables({"autotune": False}) == {}


def test_the_space_follows_the_model_and_the_hosts():
    (small,) = space_of(1000, 1, {}, with_codec=True)
    assert small.name == "bucket_kib" and small.choices == ("256",)
    sizes, chunks, codec = space_of(1500 << 10, 2, {"codec": ["fp16", "none"]}, with_codec=True)
    assert sizes.choices == ("256", "512", "1024", "2048") and chunks.name == "chunk_kib"
    assert codec.choices == ("fp16", "none") and not codec.ordered
    assert len(space_of(1500 << 10, 2, {"codec": ["fp16"]}, with_codec=False)) == 2
