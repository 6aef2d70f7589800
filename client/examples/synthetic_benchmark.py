"""Images per second of a network for images, on random data: the original's benchmark.

    python -m bagua.distributed.launch --nproc_per_node=2 -m bagua.examples.synthetic_benchmark --algorithm allreduce
    bagua run --nproc-per-node 2 -m bagua.examples.synthetic_benchmark --model resnet18 --image-size 64

`bagua bench train` compares whole training steps with those of DDP.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F

import bagua.torch_api as bagua
from bagua.algorithms import GradientAllReduceAlgorithm
from bagua.examples import _common, _vision


def log(text: str) -> None:
    if bagua.get_rank() == 0:
        print(text, flush=True)


def measure(options: argparse.Namespace) -> list[float]:
    """Images per second of this rank, for each iteration."""
    name = _common.take_algorithm(options)
    if options.deterministic:
        torch.manual_seed(bagua.get_rank())
        torch.backends.cudnn.deterministic = True
    device = torch.device("cpu") if options.no_cuda else _common.device()
    model = _vision.make(options.model).to(device)
    total = options.num_warmup_batches + options.num_iters * options.num_batches_per_iter
    if name in ("qadam", "one_bit_adam", "zero_one_adam"):
        optimizer = _common.adam_for(name, model.parameters(), 1e-3, total)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * bagua.get_world_size())
    model = model.with_bagua([optimizer], GradientAllReduceAlgorithm(codec="fp16") if options.fp16_allreduce else None)
    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(1000, (options.batch_size,), device=device)

    def step() -> None:
        optimizer.zero_grad()
        precision = torch.autocast(device.type, torch.bfloat16) if options.amp else contextlib.nullcontext()
        with precision:
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    kind = device.type.upper().replace("CUDA", "GPU")
    log(f"Model: {options.model}\nBatch size: {options.batch_size}\nNumber of {kind}s: {bagua.get_world_size()}")
    log("Running warmup...")
    for _ in range(options.num_warmup_batches):
        step()
    log("Running benchmark...")
    found = []
    for iteration in range(options.num_iters):
        bagua.barrier()  # ranks begin together: rates are added up
        started = time.perf_counter()
        for _ in range(options.num_batches_per_iter):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()  # the GPU works on after step() has returned
        rate = options.batch_size * options.num_batches_per_iter / (time.perf_counter() - started)
        found.append(rate)
        log(f"Iter #{iteration}: {rate * bagua.get_world_size():.1f} img/sec {kind}")
    _common.finish(model)
    return found


def summarise(mine: Sequence[float]) -> None:
    """The mean of each rank and of all, with 1.96 standard deviations. Every rank calls it."""
    ranks = bagua.get_world_size()
    rates = torch.empty(ranks * len(mine), dtype=torch.float64)
    bagua.allgather(torch.tensor(mine, dtype=torch.float64), rates)
    by_rank = rates.view(ranks, -1).tolist()
    for rank, found in enumerate(by_rank):
        log(f"Img/sec of rank {rank}: {statistics.fmean(found):.1f} +-{1.96 * statistics.pstdev(found):.1f}")
    together = [sum(column) for column in zip(*by_rank, strict=True)]
    spread = 1.96 * statistics.pstdev(together)
    log(f"Total img/sec on {ranks} rank(s): {statistics.fmean(together):.1f} +-{spread:.1f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _common.add_algorithm(parser)
    parser.add_argument("--model", default="resnet50", help=f"{', '.join(_vision.MODELS)} (resnet50)")
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank (32)")
    parser.add_argument("--image-size", type=int, default=224, help="pixels (224)")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="steps that don't count (10)")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="steps of an iteration (10)")
    parser.add_argument("--num-iters", type=int, default=10, help="iterations (10)")
    parser.add_argument("--no-cuda", action="store_true", help="on the processor, even where there is a GPU")
    parser.add_argument("--deterministic", action="store_true", help="the same random numbers every time")
    parser.add_argument("--amp", action="store_true", help="bfloat16 where autocast allows it")
    parser.add_argument("--fp16-allreduce", action="store_true", help="gradients travel as float16 between hosts")
    options = parser.parse_args(arguments)
    bagua.init_process_group()
    summarise(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
