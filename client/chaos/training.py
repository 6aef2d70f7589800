"""The program that is trained while faults are played: ``python -m bagua.chaos.training FOLDER WORKERS``, and seconds
of rest after a step, if wanted.

It counts what is used. Each sample has an entry of a parameter, whose gradient is 1 in the steps that use it. Gradients
are summed, and the parameter goes down by its gradient. So after an epoch the parameter tells how often each sample was
in a committed step, whoever was lost. A small network beside it has real gradients and an optimizer with memory.

With islands the model is sharded, and the mean over ranks is multiplied by their number where the parameter goes down.

Whoever was lost may be replaced. It ends after the epoch in which somebody makes the file ``stop`` in FOLDER.
A file ``trap-PHASE`` there holds the number of a signal, which the next newcomer sends itself when it "prepares", or
"takes" the state over. So it comes at the right moment, however short that is. ``sprung`` then names the process.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bagua.torch_api as bagua
from bagua.algorithms import GradientAllReduceAlgorithm

SAMPLES, BATCH, WIDTH = 480, 4, 64
REST_S = 0.004  # after each step, unless told otherwise: services on the same processors must have their turn


class Counting(nn.Module):
    """A network, and how often each sample was used: ``used`` is minus that."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.zeros(SAMPLES))
        self.network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, inputs: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """The loss of a batch. ``inputs``: batch x WIDTH; ``indices``: batch."""
        loss: torch.Tensor = self.used[indices].sum() + self.network(inputs).square().mean()
        return loss


def whole(tensor: Any) -> torch.Tensor:
    """The tensor, put together from the ranks of the island, all of which call it."""
    found: torch.Tensor = tensor.detach()
    return found.full_tensor() if hasattr(found, "full_tensor") else found


def shard(model: Counting) -> None:
    """Divides the model among the ranks of an island, if there are several."""
    if bagua.get_island_size() > 1:
        from torch.distributed.device_mesh import init_device_mesh  # other jobs need not wait for these imports
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (bagua.get_island_size(),))
        fully_shard(model.network, mesh=mesh)
        fully_shard(model, mesh=mesh)


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A hash of parameters and the optimizer's memory."""
    found = hashlib.sha256()
    tensors: list[torch.Tensor] = [*model.parameters()]
    tensors += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    for tensor in tensors:
        found.update(whole(tensor).numpy().tobytes())
    return found.hexdigest()[:16]


def lost_and_doubled(model: Counting, epochs: int, most_left: int) -> tuple[int, int]:
    """Samples that were used too rarely, and too often, in so many epochs. Fewer samples than ranks may be left for
    the next epoch."""
    used = (-whole(model.used)).round().to(torch.int64)
    missing = int((epochs - used).clamp(min=0).sum())
    return (missing if missing > most_left else 0), int((used - epochs).clamp(min=0).sum())


class Trap:
    """A state without content. It is taken over with all other state."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.spring("takes")

    def spring(self, phase: str) -> None:
        """Meets the signal that waits for a newcomer in this phase."""
        mine = self._folder / f"sprung-{os.getpid()}"
        try:
            (self._folder / f"trap-{phase}").rename(mine)  # one process alone gets it
        except FileNotFoundError:
            return
        number = int(mine.read_text())
        mine.write_text(f"{os.getpid()} {time.monotonic_ns()}")
        mine.rename(self._folder / "sprung")
        os.kill(os.getpid(), number)


def train(folder: Path, workers: int, rest_s: float, tell: Any) -> None:
    """Trains until it is told to stop."""
    torch.manual_seed(0)
    trap = Trap(folder)
    bagua.register_state("trap", trap)
    if bagua.is_newcomer():
        trap.spring("prepares")
    inputs = torch.randn(SAMPLES, WIDTH)
    dataset = torch.utils.data.TensorDataset(inputs, torch.arange(SAMPLES))
    sampler = bagua.contrib.ElasticSampler(dataset, batch_size=BATCH)
    loader = sampler.loader(num_workers=workers, **({"multiprocessing_context": "fork"} if workers else {}))
    model: Any = Counting()
    shard(model)
    summed = bagua.get_island_size() == 1
    optimizer = torch.optim.SGD(
        [
            {"params": [model.used], "lr": 1.0, "momentum": 0.0},
            {"params": model.network.parameters(), "lr": 1e-3, "momentum": 0.9},
        ]
    )
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm(average=not summed))
    largest, complete = bagua.get_world_size(), not bagua.is_newcomer()
    stop = bagua.empty(1)
    for epoch in sampler.epochs(1_000_000):
        for values, indices in loader:
            optimizer.zero_grad()
            model(values, indices).backward()
            if not summed:  # of the ranks whose gradients the step has
                optimizer.param_groups[0]["lr"] = float(bagua.get_world_size())
            optimizer.step()
            complete = complete and bagua.get_world_size() == largest
            tell(f"step {time.monotonic_ns()} {bagua.get_world_size()}")
            time.sleep(rest_s)
        largest = max(largest, bagua.get_world_size())
        lost, doubled = lost_and_doubled(model, epoch + 1, largest - 1)
        ranks = largest if complete else 0
        tell(f"epoch {epoch} {digest(model, optimizer)} {lost} {doubled} {ranks} {time.monotonic_ns()}")
        stop.fill_(float((folder / "stop").exists()))
        # All leave after the same epoch, whoever has seen the file.
        bagua.allreduce_inplace(stop, op=bagua.ReduceOp.MAX)
        if stop.item():
            break
    tell("end")


def main() -> None:
    folder, workers = Path(sys.argv[1]), int(sys.argv[2])
    rest_s = float(sys.argv[3]) if len(sys.argv) > 3 else REST_S
    torch.set_num_threads(1)
    bagua.init_process_group()
    # Each line at once: the rank may be killed after it.
    with (folder / f"diary-{os.getpid()}").open("a", buffering=1) as diary:
        train(folder, workers, rest_s, lambda line: diary.write(f"{line}\n"))


if __name__ == "__main__":
    main()
