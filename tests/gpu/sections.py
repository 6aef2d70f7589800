"""The sections of the GPU tests: one table, and how the time is shared out between them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """``module``: run as ``python -m gpu.<module>``. ``limit_s``: the most that it may take; ``least_s``: less is no
    use. ``needs``: what was built, and what Machine.lacking knows. ``alone``: it measures times (or the card's memory),
    so nothing else may run beside it. ``last``: it runs after all others."""

    name: str
    module: str
    title: str
    limit_s: float
    least_s: float
    needs: tuple[str, ...] = ()
    alone: bool = True
    last: bool = False


KERNELS = ("core", "kernels")
RANKS = ("core", "GPU leg", "torch with CUDA", "grpc", "protobuf", "pytest")
"""Ranks on real engines: the rig of the tests starts them."""


SECTIONS = (
    Section("driver", "driver", "What the GPU leg relies on of the driver", 40, 20, ("torch with CUDA",)),
    Section(
        "kernels", "kernels", "Kernels: float64 references, the CPU's bits, bandwidth", 60, 20, (*KERNELS, "numpy")
    ),
    Section(
        "net_pair",
        "net_pair",
        "Bagua-Net beside NCCL's own sockets, both ranks in one process",
        60,
        25,
        ("Bagua-Net", "torch with CUDA", "numpy"),
    ),
    Section("net", "net", "Bagua-Net beside NCCL's own sockets", 60, 30, ("Bagua-Net", "torch with CUDA")),
    Section("allreduce", "allreduce", "All-reduce of the engine, by every route, beside NCCL", 75, 30, RANKS),
    Section("step", "step", "Step time beside DDP with NCCL", 66, 40, RANKS),
    Section("waits", "waits", "Waits of the host in a step", 35, 25, RANKS),
    Section("torch_group", "torch_group", "torch's NCCL group in the place of the leg's", 60, 35, RANKS),
    Section("faults", "faults", "A rank is killed in an all-reduce", 80, 40, RANKS),
    Section("regroup", "regroup", "An elastic job loses a rank in a step", 80, 40, RANKS),
    Section(
        "algorithms", "algorithms", "All algorithms on CUDA tensors against the CPU's references", 240, 60, RANKS, False
    ),
    Section("c10d", "c10d", "The backend of torch.distributed on CUDA tensors", 90, 40, (*RANKS, "c10d"), False),
    Section("features", "features", "Mixed precision, CUDA graphs, expandable segments", 60, 25, RANKS, False),
    Section(
        "kernels_random",
        "kernels_random",
        "Kernels: random calls against the CPU's bits",
        40,
        10,
        (*KERNELS, "torch with CUDA", "numpy"),
        False,
    ),
    Section("sanitizer", "sanitizer", "compute-sanitizer over the kernels", 150, 30, (*KERNELS, "numpy"), False),
    Section("stands", "stands", "What every algorithm must stand, on CUDA tensors", 150, 40, RANKS, False, True),
)
"""In the order in which they run: those that measure first, then side by side those that only check, and in the time
that is left what is checked well without a GPU."""


def by_name(names: Sequence[str]) -> list[Section]:
    """The sections with these names, in the order of the table; all if there are none. Raises ValueError."""
    known = {section.name for section in SECTIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"No section {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    return [section for section in SECTIONS if not names or section.name in names]


def groups(sections: Sequence[Section]) -> list[list[Section]]:
    """Groups of sections, one after the other; the members of a group run at the same time."""
    alone = [[section] for section in sections if section.alone]
    beside = [section for section in sections if not section.alone and not section.last]
    last = [section for section in sections if section.last]
    return [*alone, *filter(None, (beside, last))]


def time_for(group: Sequence[Section], later: Sequence[Sequence[Section]], left_s: float) -> float:
    """Seconds for a group: its limit, but the least is left for those after it. 0: not enough to begin."""
    reserved = sum(max(section.least_s for section in one) for one in later)
    share = min(max(section.limit_s for section in group), left_s - reserved)
    least = min(section.least_s for section in group)
    if share < least <= left_s:
        share = least  # those after it may fall away; this one may not
    return share if share >= least else 0.0
