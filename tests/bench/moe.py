#!/usr/bin/env python3
"""A layer of experts (top-1, one expert on each rank), forward and backward, beside the same layer over Gloo.

    python tests/bench/moe.py                                  # 4 ranks of one host
    python tests/bench/moe.py --tokens 512,4096 --width 256 --experts none,ffn --output json

Systems: bagua; gloo: the same gate and the same rows through torch.distributed's all_to_all_single; dense: as the
original's layer does it, with a place for each token that an expert could get (capacity factor 1.25), einsum and equal
blocks, over Gloo. Experts: none (what the exchange costs), linear (one matrix), ffn (two matrices, 4 times as wide).

Figures: thousands of tokens per second of all ranks together; median over rounds in which the systems take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

RUN_DEADLINE_S = 1800.0
FACTOR = 1.25


def rank_main(options: argparse.Namespace) -> None:
    """The program of a rank."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn

    import bagua.torch_api as bagua
    from bagua.bench.ranks import harness

    torch.set_num_threads(1)
    bagua.init_process_group()
    if not dist.is_initialized():
        harness.start_gloo()
    n = bagua.get_world_size()

    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, rows: torch.Tensor, gives: list[int], takes: list[int]) -> torch.Tensor:
            context.counts = gives, takes
            found = rows.new_empty(sum(takes), rows.shape[1])
            dist.all_to_all_single(found, rows.contiguous(), takes, gives)
            return found

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> Any:
            gives, takes = context.counts
            return Swap.apply(gradient, takes, gives), None, None

    def over_gloo(gate: nn.Module, expert: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        choice = gate(tokens)
        taken = torch.empty_like(choice.counts)
        dist.all_to_all_single(taken, choice.counts)
        gives, takes = choice.counts.tolist(), taken.tolist()
        rows = Swap.apply(tokens.index_select(0, choice.tokens), gives, takes)
        back = Swap.apply(expert(rows), takes, gives) * choice.weights.unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, choice.tokens, back), choice.loss

    def dense(gate: nn.Module, expert: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gates = F.softmax(F.linear(tokens, gate.wg.weight), dim=1)
        mask = F.one_hot(gates.argmax(1), n)
        loss = (gates.mean(0) * mask.float().mean(0)).sum() * n
        capacity = gate.capacity(len(tokens))
        places = mask.cumsum(0) - 1
        mask = mask * (places < capacity)
        place = F.one_hot((places * mask).sum(1), capacity).float()
        weights = torch.einsum("se,sc->sec", gates * mask, place)
        rows = torch.einsum("sec,sm->ecm", weights.bool().float(), tokens).reshape(-1, tokens.shape[1])
        rows = Swap.apply(rows, [capacity] * n, [capacity] * n)
        back = Swap.apply(expert(rows), [capacity] * n, [capacity] * n).view(n, capacity, -1)
        return torch.einsum("sec,ecm->sm", weights, back), loss

    def case(width: int, tokens: int, kind: str) -> dict[str, Callable[[], float]]:
        torch.manual_seed(bagua.get_rank())
        experts: dict[str, Callable[[], nn.Module]] = {
            "none": nn.Identity,
            "linear": lambda: nn.Linear(width, width),
            "ffn": lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)),
        }
        layer = bagua.moe.MoE(width, experts[kind](), capacity_factor=FACTOR)
        gate, expert = layer.bagua_moe.gate, layer.bagua_moe.experts.bagua_experts[0]
        inputs = torch.randn(tokens, width, requires_grad=True)
        weights = torch.randn(tokens, width)

        def turn(forward: Callable[[torch.Tensor], Any]) -> Callable[[], float]:
            def once() -> None:
                found = forward(inputs)
                torch.autograd.backward([found[0], found[1]], [weights, torch.ones(())])

            def several() -> float:
                bagua.barrier()
                return harness.slowest(harness.seconds(lambda: [once() for _ in range(options.repeat)]))

            return several

        return {
            "bagua": turn(layer),
            "gloo": turn(lambda rows: over_gloo(gate, expert, rows)),
            "dense": turn(lambda rows: dense(gate, expert, rows)),
        }

    rows = []
    for kind in options.experts.split(","):
        for tokens in map(int, options.tokens.split(",")):
            found = harness.interleave(case(options.width, tokens, kind), options.seconds)
            rates = {name: tokens * n * options.repeat / s / 1e3 for name, s in harness.medians(found).items()}
            rows.append({"expert": kind, "tokens": tokens, "width": options.width, **rates})
    if bagua.get_rank() == 0:
        Path(options.result).write_text(json.dumps(rows))
    bagua.barrier()
    harness.stop_gloo()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=4)
    parser.add_argument("--tokens", default="256,1024,4096", help="on each rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--experts", default="none,linear,ffn")
    parser.add_argument("--repeat", type=int, default=3, help="passes of one turn")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each row")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.result:
        rank_main(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        program = [str(Path(__file__).resolve()), "--result", str(result)]
        for name in ("tokens", "width", "experts", "repeat", "seconds"):
            program += [f"--{name}", str(getattr(options, name))]
        shape = ["--nnodes", str(options.nnodes), "--nproc-per-node", str(options.nproc_per_node)]
        command = [sys.executable, "-P", "-m", "bagua.cli.main", "run", "--quiet", *shape, *program]
        subprocess.run(command, check=True, timeout=RUN_DEADLINE_S, stdout=sys.stderr)
        rows: list[dict[str, Any]] = json.loads(result.read_text())
    if options.output == "json":
        where = f"{options.nnodes} x {options.nproc_per_node} ranks"
        print(json.dumps({"unit": "1000 tokens/s", "where": where, "system": platform.platform(), "rows": rows}))
        return
    print(f"{'expert':<8}{'tokens':>8}{'bagua':>10}{'gloo':>18}{'dense':>18}   (1000 tokens/s; times as fast)")
    for row in rows:
        peers = "".join(f"{row[name]:>11.0f} ({row['bagua'] / row[name]:.1f})" for name in ("gloo", "dense"))
        print(f"{row['expert']:<8}{row['tokens']:>8}{row['bagua']:>10.0f}{peers}")


if __name__ == "__main__":
    main()
