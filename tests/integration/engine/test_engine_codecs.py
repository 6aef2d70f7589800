"""All-reduces that cross between hosts encoded: real processes, every codec, against the plain mathematics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bagua.csrc import load

LAYOUTS = {
    "one each": [[0], [1]],
    "unequal": [[0, 1, 2], [3]],
    "three hosts": [[0], [1, 2], [3]],
}
DENSITY = 655  # of worker_scripts/encoded.py


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_codec_equals_the_mathematics(make_world: Callable[..., Any], layout: str) -> None:
    """Bit for bit, over several steps of error feedback, on every rank of every host."""
    hosts = LAYOUTS[layout]
    results = make_world(hosts, chunk_bytes=65536).run("compressed", hosts=hosts, counts=[1, 40_003], steps=3)
    assert [result["wrong"] for result in results.values()] == [[]] * len(results)
    assert len({result["digest"] for result in results.values()}) == 1
    assert all(result["residual_bytes"] > 8 * 4 * 40_003 for result in results.values())


def expected_bytes(codec: str, count: int, hosts: int) -> int:
    """The share that one of ``hosts`` hosts has to send: (hosts - 1) / hosts of the vector, there and back."""
    share, core = count // hosts, load()
    density = DENSITY if codec == "topk" else 0
    encoded: int = 4 * share if codec == "none" else core.encoded_bytes(core.CODECS[codec], share, density)
    return 2 * (hosts - 1) * encoded


def test_encoded_bytes_cross_once_for_each_host(make_world: Callable[..., Any]) -> None:
    """As many as the formats say, however many ranks a host has."""
    count = 1 << 20
    alone = make_world([[0], [1]]).run("traffic", count=count)
    pairs = make_world([[0, 1], [2, 3]]).run("traffic", count=count)
    triple = make_world([[0], [1, 2], [3]]).run("traffic", count=3 << 18)
    for codec in load().CODECS:
        wanted = expected_bytes(codec, count, 2)
        for result in (alone[0], alone[1], pairs[0], pairs[2]):
            assert wanted <= result["sent"][codec] <= 1.02 * wanted + 8192, codec
        wanted = expected_bytes(codec, 3 << 18, 3)
        for result in triple.values():
            assert wanted <= result["sent"][codec] <= 1.02 * wanted + 8192, codec


def test_residuals_go_with_their_communicator(make_world: Callable[..., Any], wait_for: Callable[..., None]) -> None:
    world = make_world([[0], [1]])
    world.connect()
    world.start("residuals")
    assert all(result["held"] >= 20_000 for result in world.lines().values())
    for rank, engine in enumerate(world.engines):
        wait_for(lambda engine=engine: engine.stats()["residual_bytes"] == 0)
        world.go_on(rank)
    assert world.lines() == {0: {"held": 0}, 1: {"held": 0}}


CALL = ["allreduce", "float32", {"count": 100, "codec": 5, "residual": 1}]
MISMATCHES = {
    "codec": ({"count": 100}, "SUM, rank 0 (host 0) passed 100 x float32, SUM, codec minmax8 with error feedback"),
    "other codec": ({"count": 100, "codec": 7, "residual": 1}, "codec onebit with error feedback"),
    "feedback": ({"count": 100, "codec": 5}, "(host 1) passed 100 x float32, SUM, codec minmax8, rank 0"),
    "density": ({"count": 100, "codec": 8, "density": 9, "residual": 1}, "codec topk of density 9/65536"),
    "exact": ({"count": 100, "codec": 5, "residual": 1, "exact": 2}, "error feedback, the last 2 exact, rank 0"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_mismatch_between_hosts_names_the_codec(make_world: Callable[..., Any], what: str) -> None:
    other, text = MISMATCHES[what]
    results = make_world([[0], [1]]).run("call", calls=[[CALL], [["allreduce", "float32", other]]])
    errors = [result["error"] for result in results.values()]
    assert errors[0] == errors[1]
    assert text in errors[0]


REFUSED = {
    "kind": (
        ["broadcast", "float32", {"count": 8, "root": 0, "codec": 1}],
        "codec fp16; only all-reduce takes a codec",
    ),
    "dtype": (["allreduce", "float64", {"count": 8, "codec": 5}], "codec minmax8 for float64; codecs take float32"),
    "op": (["allreduce", "float32", {"count": 8, "codec": 5, "op": "MAX"}], "for MAX; codecs take SUM and AVG"),
    "unknown": (["allreduce", "float32", {"count": 8, "codec": 77}], "codec 77, which is unknown"),
    "density": (["allreduce", "float32", {"count": 8, "codec": 8}], "codec topk with density 0"),
    "exact": (["allreduce", "float32", {"count": 8, "codec": 5, "exact": 9}], "9 exact elements of a vector of 8"),
    "no codec": (["allreduce", "float32", {"count": 8, "residual": 3}], "residual 3 without a codec"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_codecs_are_refused_where_they_do_not_work(make_world: Callable[..., Any], what: str) -> None:
    call, text = REFUSED[what]
    results = make_world([[0]]).run("call", calls=[[call]])
    assert text in results[0]["error"]


def test_residual_of_another_length(make_world: Callable[..., Any]) -> None:
    longer = ["allreduce", "float32", {"count": 101, "codec": 5, "residual": 1}]
    results = make_world([[0], [1]]).run("call", calls=[[CALL, longer]] * 2)
    for result in results.values():
        assert "residual 1 was made for 100 elements and is now used with 101" in result["error"]
