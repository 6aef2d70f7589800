"""``train.py``, which commands of pages run, where the page does not show the whole of it."""

from rig.docs import code_blocks, pages

BEGIN = """
import itertools

import torch
from torch import nn
from torch.utils.data import DataLoader


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


torch.manual_seed(0)
samples = [(torch.randn(4), index % 2) for index in range(512)]
loader = DataLoader(samples, batch_size=8)
loss = nn.functional.cross_entropy
"""
FOR_EVER = "loader = itertools.cycle(loader)\n"
STEPS = "10_000"


def part(page, language):
    """The first part of a program on a page."""
    found = next(block for block in pages.of_path(pages.ROOT / page) if block.language == language and not block.file)
    return code_blocks.after(found.text) if language == "diff" else found.text


def of_readme(for_ever=False):
    """The script of the first page, with a small model."""
    return BEGIN + FOR_EVER * for_ever + part("README.md", "diff")


def of_checkpoints():
    """The loop of docs/checkpoints.md, which ends after fewer steps."""
    step = "inputs, labels = next(batches)\n    loss = nn.functional.cross_entropy(model(inputs), labels)"
    loop = part("docs/checkpoints.md", "python").replace("...", step, 1)
    assert step in loop and STEPS in loop, "the page has another loop"
    begin = part("README.md", "diff").partition("model = model.with_bagua")[0]
    names = "batches, algorithm = itertools.cycle(loader), gradient_allreduce.GradientAllReduceAlgorithm()\n"
    schedule = "scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)\n"
    return "\n".join([BEGIN, begin, names, schedule, loop.replace(STEPS, "150")])


def of_ddp():
    """The script of docs/quickstart.md on the backend "bagua", small."""
    text = part("docs/quickstart.md", "python")
    assert '"gloo"' in text and "default=2048" in text
    return text.replace('"gloo"', '"bagua"').replace("default=2048", "default=32")


def of_autotuning():
    """A script that ends once something was tried."""
    return """
import torch
import bagua.torch_api as bagua

bagua.init_process_group()
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.with_bagua([optimizer], tune={"bucket_kib": [16, 32, 64], "chunk_kib": [64, 512]})
tried = torch.zeros(1)
while not tried.item():
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    decider = model.bagua_ddp._tuner._decider
    tried.fill_(0 if decider is None else decider._tried)
    bagua.allreduce_inplace(tried, op=bagua.ReduceOp.MAX)
"""


def of_jobs():
    """The files of docs/jobs.md."""
    return {"train.py": of_readme(), "job.toml": part("docs/jobs.md", "toml")}
