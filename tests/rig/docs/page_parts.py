"""Runs parts of programs on pages: Python blocks without a title, and the new lines of changes.

A part takes names for granted, such as ``model`` and ``loader``. They are here, as small as can be. Ranks run the parts
in ``integration/torch_api/test_torch_page_parts.py``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import bagua.torch_api as bagua
from bagua.base.errors import ConfigError
from bagua.torch_api.algorithms import gradient_allreduce
from rig.docs import code_blocks, pages

SAMPLES, WIDTH = 24, 4

Names = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class World:
    """``names``: made anew before each block. ``smaller``: words of the page, and those for which a test can wait.
    ``then``: Python that uses what a block has made, by the name that it has made."""

    names: Names
    smaller: Mapping[str, str] = field(default_factory=dict)
    then: Mapping[str, str] = field(default_factory=dict)


class Net(nn.Sequential):
    """Four inputs, two classes."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))


class Progress:
    """State of a script. Each look at ``step`` is a step."""

    def __init__(self):
        self.steps = 0

    @property
    def step(self):
        self.steps += 1
        return self.steps

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def script():
    """Names of a training script."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dataset = [(torch.randn(WIDTH), index % 2) for index in range(SAMPLES)]
    return {
        "torch": torch,
        "nn": nn,
        "dist": dist,
        "bagua": bagua,
        "DataLoader": DataLoader,
        "gradient_allreduce": gradient_allreduce,
        "Net": Net,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "algorithm": gradient_allreduce.GradientAllReduceAlgorithm(),
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=8),  # type: ignore[arg-type]  # a list is a dataset
        "loss": nn.functional.cross_entropy,
        "epochs": 1,
    }


def wrapped():
    """The same after ``with_bagua``."""
    names = script()
    names["model"].with_bagua([names["optimizer"]], names["algorithm"])
    return names


def checkpoints():
    """The loss of a step is there."""
    names = script()
    inputs = torch.randn(8, WIDTH)
    return names | {"loss": SimpleNamespace(backward=lambda: names["model"](inputs).sum().backward())}


def data():
    """Costs of samples, and a file of pieces."""
    return script() | {"lengths": [1 + index % 5 for index in range(SAMPLES)], "paths": [Path(torch.__file__)]}


def elastic():
    """A tensor, and the progress of a script."""
    return script() | {"tensor": torch.ones(3), "progress": Progress(), "steps": 3}


def layers():
    """Activations of a rank, and what checkpoints need."""
    names = script()
    features = torch.ones(8, 3, requires_grad=True)
    losses = {"task_loss": torch.ones(()), "balance": torch.ones(())}
    return names | losses | {"features": features, "iteration": 7, "folder": "saved", "lr_scheduler": None}


def profiling():
    """Batches and a step."""
    names = wrapped()

    def train_step(inputs, labels):
        names["loss"](names["model"](inputs), labels).backward()
        names["optimizer"].step()

    return names | {"batches": names["loader"], "train_step": train_step}


def ddp():
    """A model of torch's DDP."""
    return script() | {"ddp": DistributedDataParallel(Net())}


def uneven():
    """Ranks have different numbers of batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which torch itself calls
        from torch.distributed.optim import ZeroRedundancyOptimizer
    names = wrapped()
    samples = names["dataset"][: 8 * (1 + bagua.get_rank())]
    parameters = names["model"].parameters()
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.01)
    return names | {"loader": DataLoader(samples, batch_size=8), "zero_optimizer": zero}


def style():
    """Names that the example of style calls."""
    return {
        "Network": lambda rate, delay: (rate, delay),
        "ConfigError": ConfigError,
        "RATES": {"1gbit": 1e9},
        "seconds": lambda text: float(text.removesuffix("ms")) / 1000,
    }


STEP = "loss(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.int64)).backward(); optimizer.step()"
BEGUN = {"bagua.init_process_group()": "pass"}
"""Ranks of the test have begun already."""
WORLDS = {
    "CONTRIBUTING.md": World(style, then={"parse_network": 'assert parse_network("1gbit,5ms") == (1e9, 0.005)'}),
    "README.md": World(script, BEGUN),
    "algorithms/README.md": World(
        script,
        then={
            "NormalisedMeanImpl": STEP,
            "ScaledImpl": "class Scaled(Algorithm):\n    def reify(self, process_group):\n"
            f"        return ScaledImpl(process_group)\nmodel.with_bagua([optimizer], Scaled())\n{STEP}",
        },
    ),
    "docs/autotuning.md": World(script, then={"model": STEP}),
    "docs/checkpoints.md": World(checkpoints, {"10_000": "4", "every=100": "every=2"}),
    "docs/concepts/plan.md": World(script),
    "docs/data.md": World(data, {"num_workers=4": "num_workers=0", "...\nprint": "[*loader]\nprint"}),
    "docs/elastic.md": World(elastic, BEGUN | {"num_workers=4": "num_workers=0", "epochs(10)": "epochs(1)"}),
    "docs/layers.md": World(
        layers,
        {"2048": "8"},
        {"rows": "rows.sum().backward()", "Block": "Block()(torch.randn(2, 5, 512))[0].sum().backward()"},
    ),
    "docs/moving/ddp.md": World(script, BEGUN, {"DistributedDataParallel": "DistributedDataParallel(model)"}),
    "docs/optimizer.md": World(script, then={"model": STEP}),
    "docs/profiling.md": World(profiling, {'"profile.json"': 'f"profile-{bagua.get_rank()}.json"'}),
    "docs/running.md": World(script, then={"model": STEP}),
    "docs/torch-distributed-programs.md": World(ddp, then={"ddp": STEP.replace("model(", "ddp(")}),
    "docs/uneven.md": World(uneven),
}
"""By page. All run on the same ranks, which ``bagua.init_process_group`` was called on."""
ALONE = {
    page: World(script, then={"dist": "tensor = torch.ones(3); dist.all_reduce(tensor); assert tensor[0] == 2"})
    for page in ("docs/moving/fsdp.md", "docs/torch-distributed.md")
}
"""Pages whose part brings up ``torch.distributed``."""


def run_page(page, world):
    """Runs all parts in order, each with the names that those before have left. Returns how many there are."""
    found = [block for block in pages.of_path(pages.ROOT / page) if block.is_part and not block.mark]
    names = {}
    for block in found:
        _run(block, world, names)
    return len(found)


def _run(block, world, names):
    """Tracebacks name the line of the page."""
    text = block.text if block.language == "python" else code_blocks.after(block.text)
    for words, smaller in world.smaller.items():
        text = text.replace(words, smaller)
    names |= world.names()
    exec(compile("\n" * (block.line - 1) + text, block.page, "exec", dont_inherit=True), names)
    for name, use in world.then.items():
        if re.search(rf"\b{name}\b", text):
            exec(compile(use, f"{block.where}, then", "exec", dont_inherit=True), names)
