#!/usr/bin/env python3
"""A layer of experts (top-1, one expert on each rank), forward and backward, beside the same layer over Gloo.

    python tests/bench/moe.py                                  # 4 ranks of one host
    python tests/bench/moe.py --tokens 512,4096 --width 256 --experts none,ffn
    python tests/bench/moe.py --systems bagua,gloo,dense --tokens 256,1024 --rounds 5

Systems: bagua; gloo: the same gate and the same rows through torch.distributed's all_to_all_single; dense: as the
original's layer does it, with a place for each token that an expert could get (capacity factor 1.25), einsum and equal
blocks, over Gloo (slow); alone: each rank's tokens stay with its own expert, so no exchange could be faster. Experts:
none (what the exchange costs), linear (one matrix), ffn (two matrices, 4 times as wide).

Systems take turns in each round. Figures are medians over rounds: thousands of tokens per second of all ranks together,
how many times as fast bagua is (of the ratios within a round), and microseconds of processor time per token (user and
system, of all ranks and of bagua's daemon), which other programs on the machine change least.
"""

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import bagua.torch_api as bagua
from bagua.bench.ranks import harness
from bagua.cli.bench import tasks

FACTOR = 1.25
MOST_PASSES = 1000


def measure(config):
    """The rows, of a rank."""
    options = argparse.Namespace(**config)
    harness.start_gloo()
    n = bagua.get_world_size()

    class Swap(torch.autograd.Function):
        @staticmethod
        def forward(context, rows, gives, takes):
            context.counts = gives, takes
            found = rows.new_empty(sum(takes), rows.shape[1])
            dist.all_to_all_single(found, rows.contiguous(), takes, gives)
            return found

        @staticmethod
        def backward(context, gradient):
            gives, takes = context.counts
            return Swap.apply(gradient, takes, gives), None, None

    def over_gloo(gate, expert, tokens):
        choice = gate(tokens)
        taken = torch.empty_like(choice.counts)
        dist.all_to_all_single(taken, choice.counts)
        gives, takes = choice.counts.tolist(), taken.tolist()
        rows = Swap.apply(tokens.index_select(0, choice.tokens), gives, takes)
        back = Swap.apply(expert(rows), takes, gives) * choice.weights.unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, choice.tokens, back), choice.loss

    def alone(gate, expert, tokens):
        choice = gate(tokens)
        back = expert(tokens.index_select(0, choice.tokens)) * choice.weights.unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, choice.tokens, back), choice.loss

    def dense(gate, expert, tokens):
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

    def case(width, tokens, kind):
        torch.manual_seed(bagua.get_rank())
        experts = {
            "none": nn.Identity,
            "linear": lambda: nn.Linear(width, width),
            "ffn": lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)),
        }
        layer = bagua.moe.MoE(width, experts[kind](), capacity_factor=FACTOR)
        gate, expert = layer.bagua_moe.gate, layer.bagua_moe.experts.bagua_experts[0]
        inputs = torch.randn(tokens, width, requires_grad=True)
        weights = torch.randn(tokens, width)

        def passes(forward):
            def several(number):
                for _ in range(number):
                    layer.zero_grad()
                    inputs.grad = None
                    found = forward(inputs)
                    torch.autograd.backward([found[0], found[1]], [weights, torch.ones(())])

            return several

        return {
            "bagua": passes(layer),
            "gloo": passes(lambda rows: over_gloo(gate, expert, rows)),
            "alone": passes(lambda rows: alone(gate, expert, rows)),
            "dense": passes(lambda rows: dense(gate, expert, rows)),
        }

    def turn(several, number):
        """Seconds of the slowest rank, and processor seconds of all together."""
        bagua.barrier()
        spent = processor_s()
        taken = harness.seconds(lambda: several(number))
        spent = processor_s() - spent
        both = torch.tensor([taken, spent], dtype=torch.float64)
        every = torch.empty(n, 2, dtype=torch.float64)
        bagua.allgather(both, every)
        return every[:, 0].max().item(), every[:, 1].sum().item()

    def processor_s():
        """Of this rank, and on the first rank of a host also of its daemon."""
        daemon = time.clock_gettime((~os.getppid() << 3) | 2) if bagua.get_local_rank() == 0 else 0.0
        return time.process_time() + daemon

    def measured(kind, tokens):
        systems = {name: one for name, one in case(options.width, tokens, kind).items() if name in options.systems}
        for one in systems.values():
            turn(one, 2)
        number = {
            name: max(1, min(MOST_PASSES, int(options.turn / turn(one, 2)[0] * 2))) for name, one in systems.items()
        }
        orders = [list(systems.items()), list(systems.items())[::-1]]
        rounds = [{name: turn(one, number[name]) for name, one in orders[i % 2]} for i in range(options.rounds)]
        row = {"expert": kind, "tokens": tokens, "width": options.width}
        for name in systems:
            each = tokens * n * number[name]
            rates = [each / one[name][0] / 1e3 for one in rounds]
            times = [one[name][0] / number[name] / (one["bagua"][0] / number["bagua"]) for one in rounds]
            row[name] = statistics.median(rates)
            row[f"over {name}"] = statistics.median(times)
            row[f"processor {name}"] = statistics.median(one[name][1] / each * 1e6 for one in rounds)
        return row

    rows = [measured(kind, int(tokens)) for kind in options.experts.split(",") for tokens in options.tokens.split(",")]
    bagua.barrier()
    harness.stop_gloo()
    return {"rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc-per-node", type=int, default=4)
    parser.add_argument("--tokens", default="256,1024,4096", help="on each rank")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--experts", default="none,linear,ffn")
    parser.add_argument("--systems", default="bagua,gloo", help="bagua, and any of gloo, dense, alone")
    parser.add_argument("--rounds", type=int, default=9, help="of each row")
    parser.add_argument("--turn", type=float, default=0.3, help="seconds of each system in a round, about")
    options = parser.parse_args()
    task = tasks.Task(__file__, vars(options), 1, options.nproc_per_node, quiet=True)
    rows = tasks.measure(task, None)["rows"]
    others = [name for name in ("gloo", "dense", "alone") if name in options.systems]
    peers = "".join(f"{name:>18}" for name in others)
    print(f"{'expert':<8}{'tokens':>8}{'bagua':>10}{peers}   processor time: bagua{peers}")
    for row in rows:
        rates = "".join(f"{row[name]:>11.0f} ({row[f'over {name}']:.2f})" for name in others)
        own = row["processor bagua"]
        spent = "".join(f"{row[f'processor {name}']:>11.1f} ({row[f'processor {name}'] / own:.2f})" for name in others)
        print(f"{row['expert']:<8}{row['tokens']:>8}{row['bagua']:>10.0f}{rates}   {own:>21.1f}{spent}")
    print("Thousands of tokens per second and microseconds per token; in parentheses how many times as good bagua is.")


if __name__ == "__main__":
    harness.run(measure) if harness.on_rank() else main()
