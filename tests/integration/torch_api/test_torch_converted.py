"""Scripts for torch's DistributedDataParallel (scripts_for_ddp/) end in the same weights after ``bagua convert``
as before it, over Gloo. Collectives and hooks over backend "bagua" are in integration/c10d."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from rig.ports import free_port

from bagua.convert import convert

FOLDER = Path(__file__).with_name("scripts_for_ddp")


def rank_run(name, texts):
    """The weights of each text, by its MASTER_PORT."""
    warnings.filterwarnings("ignore", module=r"torch\.")  # as of deprecated parts that it uses itself
    kept = []  # a model holds its group, and Gloo may wait for ever when Python frees that
    for port, text in texts.items():
        os.environ["MASTER_PORT"] = port
        names = {"__name__": "__main__"}
        exec(compile(text, f"{name}.py", "exec"), names)
        kept.append(names)
    return [names["weights"] for names in kept]


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_a_converted_script_ends_in_the_same_weights(ranks, name):
    before = (FOLDER / f"{name}.py").read_bytes()
    [converted] = convert({name: before})
    after = converted.after.decode()
    assert "data_parallel" in after, after
    assert convert({name: converted.after})[0].changes == 0, "converting again changes nothing"
    texts = {str(free_port()): text for text in (before.decode(), after)}
    found = ranks.run(rank_run, 2, environment={"MASTER_ADDR": "127.0.0.1"}, name=name, texts=texts)
    for expected, weights in found:
        assert torch.equal(weights, expected), (weights - expected).abs().max()
