"""A rank of the section ``allreduce``: is the result right, and how long does it take beside plain NCCL?"""

import warnings
from time import monotonic

import torch
import torch.distributed as dist

import bagua.torch_api as bagua
from gpu.common import device_of, keep
from gpu.group import agreed, cost_of, in_turns, join, predicted, slowest

# Relative error (L2) that a sum may have, and that it has with each codec.
BOUNDS = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "minmax8": 5e-2, "fp8_e4m3": 0.1, "int4": 0.4, "onebit": 1.0}
WORKS = ("bagua", "nccl")


def vector(rank, count):
    """The same numbers wherever they are made."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def result_errors(count, device, codecs):
    """Of each codec: how far the mean is from float64; 9 if it has other bits on another rank."""
    ranks = bagua.get_world_size()
    exact = sum(vector(rank, count).double() for rank in range(ranks)) / ranks
    found = {}
    for codec in codecs:
        data = vector(bagua.get_rank(), count).to(device)
        more = {} if codec == "none" else {"codec": codec}
        bagua.allreduce_inplace(data, op=bagua.ReduceOp.AVG, **more)
        mine = data.cpu()
        first = data.clone()
        dist.broadcast(first, 0)
        same = bool((first.cpu().view(torch.int32) == mine.view(torch.int32)).all())
        found[codec] = float((mine.double() - exact).norm() / exact.norm()) if same else 9.0
    return found


def seconds_of(size, device, codec):
    """Seconds of our all-reduce and of NCCL's, on a vector of ``size`` bytes."""
    ours, theirs = (torch.zeros(size // 4, device=device) for _ in range(2))
    more = {} if codec == "none" else {"codec": codec}
    works = {
        "bagua": lambda: bagua.allreduce_inplace(ours, op=bagua.ReduceOp.AVG, **more),
        "nccl": lambda: dist.all_reduce(theirs),
    }
    return {name: slowest(value, device) for name, value in in_turns(works, device).items()}


def measure(port, kind, sizes, codecs, limit_s):
    """Findings of this rank. ``codecs``: those whose results are checked; the first two are timed."""
    warnings.simplefilter("default")  # what torch warns of is no matter here
    until = monotonic() + 0.7 * limit_s
    device = device_of(kind)
    join(port, device, limit_s)
    found = {"errors": {}, "seconds": {}}
    for count in (1, 1000, 300_001):
        found["errors"][str(count)] = result_errors(count, device, codecs)
        keep(found)
    known = {}
    for size in sizes:
        for codec in codecs[:2]:
            cost = cost_of(predicted(known[codec, name], size) for name in WORKS if (codec, name) in known)
            if not agreed(float(monotonic() + cost < until), device):
                continue  # another codec may be faster
            seconds = seconds_of(size, device, codec)
            for name in WORKS:
                known.setdefault((codec, name), {})[size] = seconds[name]
            found["seconds"].setdefault(codec, {})[str(size)] = seconds
            keep(found)
    dist.destroy_process_group()
    return found
