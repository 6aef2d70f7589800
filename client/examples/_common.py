"""Helpers of all examples: options, algorithm and optimizer, the training loop, the table at the end of a job."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

import bagua.torch_api as bagua
from bagua.algorithms import OneBitAdamOptimizer, QAdamOptimizer, ZeroOneAdamOptimizer
from bagua.base.algorithm_choice import VARIABLE, check, parse
from bagua.base.errors import ConfigError
from bagua.base.text import json_text

# Names of algorithms in the READMEs and examples of the original.
ALIASES = {
    "allreduce": "gradient_allreduce",
    "quantize": "bytegrad",
    "decentralize": "decentralized",
    "1bit-adam": "one_bit_adam",
    "onebit_adam": "one_bit_adam",
}


def parser(text: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """Options of every example; ``text``: its docstring. An option of ``defaults`` has that default."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    helps = {
        "epochs": "passes over the training data",
        "batch_size": "samples of each rank in a step",
        "lr": "learning rate",
        "seed": "of weights and samples",
    }
    for name, default in {"seed": 0, **defaults}.items():
        made.add_argument(
            f"--{name.replace('_', '-')}", type=type(default), default=default, help=f"{helps[name]} ({default})"
        )
    made.add_argument("--output", choices=("text", "json"), default="text")
    return made


def add_algorithm(made: argparse.ArgumentParser, interval: int = 500) -> None:
    """--algorithm and --async-sync-interval, as the original's examples have them."""
    made.add_argument("--algorithm", help="NAME[:key=value,…]; default: as `bagua run --algorithm`, gradient_allreduce")
    made.add_argument("--async-sync-interval", type=int, default=interval, metavar="MS", help="of algorithm async")


def take_algorithm(options: argparse.Namespace) -> str:
    """The name of the algorithm; ``with_bagua`` takes the one that --algorithm names. Ends the process (2) with words
    for one that does not exist."""
    if options.algorithm:
        name = ALIASES.get(options.algorithm, options.algorithm)
        if name == "async":
            name = f"async:sync_interval_ms={options.async_sync_interval}"
        try:
            os.environ[VARIABLE] = check(name)
        except ConfigError as error:
            print(f"--algorithm: {error}", file=sys.stderr)
            sys.exit(2)
    return parse(os.environ.get(VARIABLE) or "gradient_allreduce")[0]


def device() -> torch.device:
    """Returns the GPU of this rank; the processor where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(bagua.get_local_rank())
    return torch.device("cuda", bagua.get_local_rank())


def run(
    options: argparse.Namespace,
    train: Callable[[argparse.Namespace], Outcome],
    result: str = "",
    at_least: float = 0.0,
) -> int:
    """Runs one rank of an example: joins the job, trains, and prints the outcome on rank 0. Returns the exit code: 1 if
    replicas differ or ``result`` is too small."""
    bagua.init_process_group()
    found = train(options)
    if bagua.get_rank() == 0:
        found.print(options.output)
    return found.verdict(result, at_least)


def share(dataset: Dataset[Any], batch_size: int, seed: int, workers: int = 0) -> DataLoader[Any]:
    """Returns a loader of this rank's share of each epoch, in batches."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=bagua.get_world_size(), rank=bagua.get_rank(), seed=seed
    )
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, num_workers=workers)


@torch.no_grad()
def accuracy(
    model: nn.Module,
    dataset: Dataset[Any],
    batch_size: int = 1000,
    logits_of: Callable[[nn.Module, Tensor], Tensor] = lambda model, inputs: cast(Tensor, model(inputs)),
    workers: int = 0,
) -> float:
    """Share of the dataset that the model gets right. All ranks call it, each computes a part."""
    count = len(cast(Sized, dataset))
    part = Subset(dataset, range(bagua.get_rank(), count, bagua.get_world_size()))
    where = next(model.parameters()).device
    right = torch.zeros((), dtype=torch.float64)
    model.eval()
    for inputs, labels in DataLoader(part, batch_size=batch_size, num_workers=workers):
        right += (logits_of(model, inputs.to(where)).argmax(dim=1).cpu() == labels).sum()
    model.train()
    bagua.allreduce_inplace(right)
    return float(right) / count


@dataclass(frozen=True)
class Fitted:
    """A training's steps, seconds, and its last result."""

    steps: int
    seconds: float
    result: float


def fit(
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    evaluate: Callable[[], float],
    epochs: Iterable[int],
    *,
    update: Callable[[], object] | None = None,
    most_batches: int | None = None,
    report_every: int = 1,
) -> Fitted:
    """Trains on ``share``'s batches for these epochs; the learning rate follows steps.

    ``loss_of``: the loss on a batch. ``evaluate``: after each epoch. ``update``: instead of ``optimizer.step``.
    ``most_batches``: of each epoch. ``report_every``: steps between two reports of progress.
    """
    numbers = list(epochs)
    total = len(numbers) * min(len(loader), most_batches or len(loader))
    bagua.barrier()  # the clock starts when all are there
    started, step, right = time.monotonic(), 0, 0.0
    for epoch in numbers:
        cast(DistributedSampler[Any], loader.sampler).set_epoch(epoch)  # else each epoch has the order of the first
        for inputs, labels in islice(loader, most_batches):
            optimizer.zero_grad()
            loss = loss_of(inputs, labels)
            loss.backward()
            (update or optimizer.step)()
            schedule.step()
            step += 1
            if bagua.get_rank() == 0 and step % report_every == 0:
                speed = step / (time.monotonic() - started)
                bagua.report(step=step, total=total, metrics={"loss": loss.item(), "acc": right, "steps/s": speed})
        right = evaluate()
    return Fitted(step, time.monotonic() - started, right)


def need(module: str) -> None:
    """Ends the process with words if a module that examples need is not installed."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        sys.exit(f'{module} is not installed, and this example needs it: pip install "bagua[examples]"')


def make_optimizer(
    parameters: Iterable[nn.Parameter], lr: float, steps: int, betas: tuple[float, float] = (0.9, 0.999)
) -> torch.optim.Optimizer:
    """AdamW, or the optimizer that goes with the algorithm of ``bagua run --algorithm``."""
    return adam_for(parse(os.environ.get(VARIABLE) or "gradient_allreduce")[0], parameters, lr, steps, betas)


def adam_for(
    algorithm: str,
    parameters: Iterable[nn.Parameter],
    lr: float,
    steps: int,
    betas: tuple[float, float] = (0.9, 0.999),
    **options: Any,
) -> torch.optim.Optimizer:
    """The Adam of an algorithm, with more ``options`` of its constructor.

    Those that encode momentum warm up for a quarter of the training's ``steps``; the variance that they then go on with
    must have been learned by then: β2 is at most 0.99. QAdam's floor, which the others have by default, keeps elements
    whose gradients have hardly been seen from being thrown far off by the encoding error of others.
    """
    warm_up, quick = max(1, steps // 4), (betas[0], min(betas[1], 0.99))
    if algorithm == "qadam":
        return QAdamOptimizer(parameters, lr=lr, betas=quick, **{"warmup_steps": warm_up, "floor": 0.1, **options})
    if algorithm == "one_bit_adam":
        return OneBitAdamOptimizer(parameters, lr=lr, betas=quick, **{"warmup_steps": warm_up, **options})
    if algorithm == "zero_one_adam":
        return ZeroOneAdamOptimizer(parameters, lr=lr, betas=quick, **{"var_freeze_step": warm_up, **options})
    return torch.optim.AdamW(parameters, lr=lr, betas=betas, **options)


def muon_and_adam(
    model: nn.Module, lr: float, betas: tuple[float, float], ratio: float = 3.0
) -> list[torch.optim.Optimizer]:
    """Muon for the weights of linear layers, at ``ratio`` times the rate, and AdamW for the rest, with embeddings and
    heads tied to them; the model has both (Jordan et al., "Muon: an optimizer for hidden layers in neural networks",
    2024). Needs torch 2.9."""
    layers = list(model.modules())
    embedded = {one.weight for one in layers if isinstance(one, nn.Embedding)}
    linear = {one.weight for one in layers if isinstance(one, nn.Linear)} - embedded
    matrices = [one for one in model.parameters() if one in linear]
    others = [one for one in model.parameters() if one not in linear]
    muon = torch.optim.Muon(matrices, lr=ratio * lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=lr, betas=betas)]


@torch.no_grad()
def take_mean(model: nn.Module) -> None:
    """Replaces all replicas by their mean, but for experts, which are each rank's own. Algorithms that
    exchange weights leave them apart. Every rank must call it."""
    for parameter in model.parameters():
        if bagua.moe.is_moe_param(parameter):
            continue
        shard: Any = parameter if hasattr(parameter, "full_tensor") else None
        mean = parameter.detach().clone() if shard is None else shard.full_tensor().detach()
        bagua.allreduce_inplace(mean, bagua.ReduceOp.AVG)
        if shard is not None:
            from torch.distributed.tensor import distribute_tensor

            mean = distribute_tensor(mean, shard.device_mesh, shard.placements)
        parameter.copy_(mean)


def finish(model: nn.Module) -> None:
    """Ends the exchange; the model becomes an ordinary one, the same on all ranks."""
    wrapper: Any = model.bagua_ddp
    apart = wrapper.bagua_algorithm.exchanged == "weight"
    wrapper.close()
    if apart:
        take_mean(model)
    for buffer in model.buffers():  # running statistics, which no gradient carries: rank 0's, as with DDP
        bagua.broadcast(buffer, src=0)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a job, the same on every rank. Bytes are sums over hosts, the hidden share is that of all ranks."""

    results: dict[str, float]
    ranks: int
    steps: int
    seconds: float
    steps_per_second: float
    bytes_inside_hosts: int
    bytes_between_hosts: int
    hidden_share: float
    replicas_identical: bool

    def print(self, output: str) -> None:
        """Prints a table, or one line of JSON if ``output`` is json."""
        if output == "json":
            print(json_text(asdict(self)), flush=True)
            return
        identical = "yes, all bit-identical" if self.replicas_identical else "NO, they differ"
        rows = {
            **{name: f"{value:.2%}" if "accuracy" in name else f"{value:.4f}" for name, value in self.results.items()},
            "steps": f"{self.steps} in {self.seconds:.1f} s",
            "steps per second": f"{self.steps_per_second:.1f}",
            "moved inside hosts": f"{self.bytes_inside_hosts / 1e6:.1f} MB",
            "moved between hosts": f"{self.bytes_between_hosts / 1e6:.1f} MB",
            "communication hidden": f"{self.hidden_share:.0%} behind computation",
            f"replicas ({self.ranks})": identical,
        }
        width = max(len(name) for name in rows)
        print("\n".join(f"{name:<{width}}  {value}" for name, value in rows.items()), flush=True)

    def verdict(self, result: str = "", at_least: float = 0.0) -> int:
        """The exit code: 1, with the reason on standard error, if replicas differ or ``result`` is too small."""
        if not self.replicas_identical:
            print("The replicas differ at the end of the training.", file=sys.stderr)
            return 1
        if result and self.results[result] < at_least:
            print(f"The {result} is {self.results[result]:.2%}, below {at_least:.0%}.", file=sys.stderr)
            return 1
        return 0


def outcome(model: nn.Module, steps: int, seconds: float, results: Mapping[str, float]) -> Outcome:
    """Collects the outcome from all ranks. Every rank must call it; ``results`` are rank 0's."""
    names = list(results)
    found = bagua.communication.statistics()
    # Bytes are counted per host: one rank of each speaks for it.
    speaks = bagua.get_local_rank() == 0
    moved = torch.tensor([found.bytes_local, found.bytes_sent] if speaks else [0, 0], dtype=torch.int64)
    times = torch.tensor([found.comm_seconds, found.exposed_seconds], dtype=torch.float64)
    values = torch.tensor([results[name] for name in names], dtype=torch.float64)
    identical = replicas_identical(model)
    bagua.allreduce_inplace(moved)
    bagua.allreduce_inplace(times)
    bagua.broadcast(values, src=0)
    inside, between = (int(count) for count in moved)
    communicating, exposed = (float(value) for value in times)
    return Outcome(
        results=dict(zip(names, values.tolist(), strict=True)),
        ranks=bagua.get_world_size(),
        steps=steps,
        seconds=round(seconds, 3),
        steps_per_second=round(steps / seconds, 2),
        bytes_inside_hosts=inside,
        bytes_between_hosts=between,
        hidden_share=round(1 - exposed / communicating, 4) if communicating else 1.0,
        replicas_identical=identical,
    )


def replicas_identical(model: nn.Module) -> bool:
    """True if parameters and buffers of all replicas are the same, bit by bit, but for experts, which are each rank's
    own. Of islands ranks at one place hold the same. Every rank must call it.
    """
    state = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if bagua.moe.is_moe_param(tensor):
            continue
        state.update(name.encode())
        held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        # Numpy knows no bfloat16.
        state.update(held.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    mine = torch.tensor(list(state.digest()), dtype=torch.uint8)
    all_digests = torch.empty(bagua.get_world_size() * len(mine), dtype=torch.uint8)
    bagua.allgather(mine, all_digests)
    size = bagua.get_island_size()
    return bool((all_digests.view(-1, size, len(mine))[:, bagua.get_rank() % size] == mine).all())
