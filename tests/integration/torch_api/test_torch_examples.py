"""The examples, on forked ranks. tests/e2e/test_examples.py runs the README's by ``bagua run``."""

import gzip
import importlib
import json
import re
import signal
import sys
import time

import pytest
import torch
from rig.ranks.engine_hosts import HANG_S

from bagua.base import islands
from bagua.examples import mnist

ISLANDS = {islands.VARIABLE: "2"}


def rank_example(name, arguments):
    """The exit code of an example."""
    sys.argv = [name, *arguments]
    return importlib.import_module(f"bagua.examples.{name}").main()


def run_example(ranks, name, arguments, code=0):
    """The output of the first one of two ranks, and the JSON document in it."""
    codes = ranks.run(rank_example, 2, name=name, arguments=arguments.split())
    output = ranks.started[0].output
    assert codes == [code, code], output
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert all(one["replicas_identical"] is True for one in found)
    ranks.close()
    return output, found


BENCHMARK = "--num-warmup-batches 1 --num-batches-per-iter 1 --num-iters 2 --batch-size 2 --image-size 32"


@pytest.mark.parametrize(
    ("name", "arguments", "code", "words"),
    [
        ("charlm", "--steps 12 --sample 40 --batch-size 8", 0, ["The model writes:"]),
        ("announcement", "", None, ["of 2 (local"]),
        ("own_algorithm", "", 0, ["NormalisedMean       held-out loss 0.0"]),
        ("communication_primitives", "", 0, [" ok\n"]),
        pytest.param(
            "synthetic_benchmark",
            f"--model resnet_tiny {BENCHMARK}",
            0,
            ["Iter #1: ", "Img/sec of rank 1: ", "Total img/sec on 2 rank(s): "],
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_example_ends(ranks, name, arguments, code, words):
    output, _ = run_example(ranks, name, arguments, code)
    assert all(one in output for one in words) and "WRONG" not in output
    if name == "charlm":
        before, after = (float(re.search(rf"held-out loss {when} +(\S+)", output)[1]) for when in ("before", "after"))
        assert after < before


def outcome_of(ranks):
    [found] = [json.loads(line) for line in ranks.started[0].output.splitlines() if line.startswith("{")]
    assert found["replicas_identical"] is True
    assert found["results"]["held-out loss after"] < found["results"]["held-out loss before"]
    return found


@pytest.mark.parametrize(
    "algorithm", ["gradient_allreduce", pytest.param("local_sgd:interval=4", marks=pytest.mark.full)]
)
def test_a_sharded_model_learns(ranks, algorithm):
    """Two islands of two ranks. The second algorithm leaves them apart: their mean counts."""
    arguments = f"--epochs 1 --characters 40000 --output json --algorithm {algorithm}".split()
    assert ranks.run(rank_example, 4, environment=ISLANDS, name="sharded", arguments=arguments) == [0] * 4
    assert outcome_of(ranks)["ranks"] == 4


def test_a_sharded_model_survives(ranks):
    """A rank is killed in the second epoch: its island is out, and the other one ends the training."""
    arguments = "--epochs 6 --characters 20000 --output json".split()
    ranks.start(rank_example, 4, elastic=True, environment=ISLANDS, name="sharded", arguments=arguments)
    end = time.monotonic() + HANG_S
    while "epoch 0 " not in ranks.started[0].output and time.monotonic() < end:
        time.sleep(0.05)
    ranks.started[3].process.send_signal(signal.SIGKILL)
    assert ranks.left([2, 3]) == [0, 0]
    assert outcome_of(ranks)["ranks"] == 2
    assert "epoch 5 loss " in ranks.started[0].output


@pytest.mark.full
def test_moe(ranks, tmp_path):
    arguments = f"--num-local-experts 2 --k 2 --epochs 1 --save-model {tmp_path}/saved --output json"
    output, found = run_example(ranks, "moe", arguments, 1)
    assert "below 95%" in output and found, output  # one epoch is too little, and the job says so
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "23"


def test_mnist(ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    few = f"--epochs 1 --max-batches 2 --output json --data {tmp_path}"
    assert run_example(ranks, "mnist", f"{few} --fuse-optimizer --save-model --algorithm allreduce")[1]
    assert torch.load(tmp_path / "mnist_cnn.pt")["fc1.weight"].shape == (128, 9216)
    images = torch.randint(256, (5, 28, 28), dtype=torch.uint8)
    head = b"\x00\x00\x08\x03" + b"".join(size.to_bytes(4, "big") for size in images.shape)
    (tmp_path / "x").write_bytes(head + bytes(images.flatten().tolist()))
    assert torch.equal(mnist.read_idx(tmp_path, "x"), images)
    (tmp_path / "y.gz").write_bytes(gzip.compress(head + bytes(images.flatten().tolist())[:-1]))
    with pytest.raises(SystemExit, match="cut off"):
        mnist.read_idx(tmp_path, "y")


def test_imagenet_goes_on_from_a_checkpoint(ranks, tmp_path):
    few = f"--arch resnet_tiny --image-size 32 -b 4 -j 0 --output json --warmup-epochs 0 --save-checkpoint {tmp_path}/c"
    _, found = run_example(ranks, "imagenet", f"{few} --synthetic 4 --epochs 1 {tmp_path}/images")
    assert found[-1]["steps"] == 5
    output, found = run_example(ranks, "imagenet", f"{few} --resume {tmp_path}/c --epochs 2 {tmp_path}/images")
    assert "rank 0: from epoch 1" in output and found[-1]["steps"] == 5
