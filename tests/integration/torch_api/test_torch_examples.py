"""The examples, on forked ranks. tests/e2e/test_examples.py runs the README's by ``bagua run``."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bagua.examples import mnist


def rank_example(name: str, arguments: list[str]) -> int | None:
    """The exit code of an example."""
    sys.argv = [name, *arguments]
    code: int | None = importlib.import_module(f"bagua.examples.{name}").main()
    return code


def run_example(ranks: Any, name: str, *arguments: str) -> tuple[list[int | None], str]:
    """(exit codes of two ranks, output of the first one)."""
    codes = ranks.run(rank_example, 2, name=name, arguments=list(arguments))
    return codes, ranks.started[0].output


def test_charlm_learns(ranks: Any) -> None:
    codes, output = run_example(ranks, "charlm", "--steps", "12", "--sample", "40", "--batch-size", "8")
    assert codes == [0, 0], output
    table = dict(line.split("  ", 1) for line in output.splitlines() if "  " in line)
    assert float(table["held-out loss after"]) < float(table["held-out loss before"])
    assert "The model writes:" in output


@pytest.mark.full
def test_digits_as_json(ranks: Any) -> None:
    codes, output = run_example(ranks, "digits", "--epochs", "1", "--output", "json")
    assert codes == [1, 1] and "below 97%" in output, output  # one epoch is too little, and the job says so
    outcome = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert outcome["replicas_identical"] is True
    assert outcome["bytes_inside_hosts"] > 0
    assert outcome["bytes_between_hosts"] == 0
    assert 0 <= outcome["hidden_share"] <= 1


def test_moe(ranks: Any, tmp_path: Path) -> None:
    options = ("--num-local-experts", "2", "--k", "2", "--epochs", "1", "--save-model", str(tmp_path / "saved"))
    codes, output = run_example(ranks, "moe", *options, "--output", "json")
    assert codes == [1, 1] and "below 95%" in output, output  # one epoch is too little, and the job says so
    assert json.loads(next(line for line in output.splitlines() if line.startswith("{")))["replicas_identical"] is True
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "23"


def test_announcement(ranks: Any) -> None:
    codes, output = run_example(ranks, "announcement")
    assert codes == [None, None]
    assert [one.output.count("of 2 (local") for one in ranks.started] == [1, 1], output


def test_own_algorithm(ranks: Any) -> None:
    codes, output = run_example(ranks, "own_algorithm")
    assert codes == [0, 0], output
    assert "NormalisedMean       held-out loss 0.0" in output


def last_outcome(output: str) -> dict[str, Any]:
    """The JSON document of rank 0."""
    found: dict[str, Any] = json.loads([line for line in output.splitlines() if line.startswith("{")][-1])
    assert found["replicas_identical"] is True
    return found


def test_mnist_with_a_fused_optimizer(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("--epochs", "1", "--max-batches", "4", "--output", "json", "--data", str(tmp_path))
    fused, output = run_example(ranks, "mnist", *few, "--fuse-optimizer", "--save-model", "--algorithm", "allreduce")
    assert fused == [0, 0], output
    last_outcome(output)
    assert torch.load(tmp_path / "mnist_cnn.pt")["fc1.weight"].shape == (128, 9216)


def test_mnist_files_are_read(tmp_path: Path) -> None:
    images = torch.randint(256, (5, 28, 28), dtype=torch.uint8)
    head = b"\x00\x00\x08\x03" + b"".join(size.to_bytes(4, "big") for size in images.shape)
    (tmp_path / "x").write_bytes(head + bytes(images.flatten().tolist()))
    assert torch.equal(mnist.read_idx(tmp_path, "x"), images)
    (tmp_path / "y.gz").write_bytes(gzip.compress(head + bytes(images.flatten().tolist())[:-1]))
    with pytest.raises(SystemExit, match="cut off"):
        mnist.read_idx(tmp_path, "y")


def test_synthetic_benchmark(ranks: Any) -> None:
    few = "--num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2 --batch-size 2 --image-size 32"
    codes, output = run_example(ranks, "synthetic_benchmark", "--model", "resnet_tiny", *few.split())
    assert codes == [0, 0], output
    assert "Iter #1: " in output and "Img/sec of rank 1: " in output and "Total img/sec on 2 rank(s): " in output


def test_communication_primitives(ranks: Any) -> None:
    codes, output = run_example(ranks, "communication_primitives")
    assert codes == [0, 0], output
    assert output.count(" ok\n") == 12 and "WRONG" not in output


def test_imagenet_goes_on_from_a_checkpoint(ranks: Any, tmp_path: Path) -> None:
    few = f"--arch resnet_tiny --image-size 32 -b 4 -j 0 --output json --warmup-epochs 0 --save-checkpoint {tmp_path}/c"
    folder = str(tmp_path / "images")
    codes, output = run_example(ranks, "imagenet", *few.split(), "--synthetic", "4", "--epochs", "1", folder)
    assert codes == [0, 0], output
    assert last_outcome(output)["steps"] == 5
    ranks.close()  # one job is over
    codes, output = run_example(ranks, "imagenet", *few.split(), "--resume", f"{tmp_path}/c", "--epochs", "2", folder)
    assert codes == [0, 0] and "rank 0: from epoch 1" in output, output
    assert last_outcome(output)["steps"] == 5
