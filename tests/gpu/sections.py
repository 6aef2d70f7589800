"""The sections of the GPU tests: one table, and how the time is shared out between them. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """Run as ``python -m gpu.<name>``. ``limit_s``: the most that it may take; ``least_s``: less is no use. ``needs``:
    what was built. ``alone``: it measures times (or the card's memory), so nothing else may run beside it. ``last``: it
    runs after all others."""

    name: str
    title: str
    limit_s: float
    least_s: float
    needs: tuple[str, ...]
    alone: bool = True
    last: bool = False


KERNELS, RANKS = ("core", "kernels"), ("core", "GPU leg")
SECTIONS = (
    Section("kernels", "Kernels: float64 references, the CPU's bits, bandwidth", 60, 20, KERNELS),
    Section("step", "Step time beside DDP with NCCL", 75, 40, RANKS),
    Section("faults", "A rank is killed in an all-reduce", 80, 40, RANKS),
    Section("regroup", "An elastic job loses a rank in a step", 80, 40, RANKS),
    Section("algorithms", "All algorithms on CUDA tensors against the CPU's references", 240, 60, RANKS, False),
    Section("c10d", "The backend of torch.distributed on CUDA tensors", 90, 40, (*RANKS, "c10d"), False),
    Section("sanitizer", "compute-sanitizer over the kernels", 150, 30, KERNELS, False),
    Section("stands", "What every algorithm must stand, on CUDA tensors", 150, 40, RANKS, False, True),
)
"""In the order in which they run: those that measure first, then side by side those that only check, and in the time
that is left what is checked well without a GPU."""


def by_name(names):
    """The sections with these names, in the order of the table; all if there are none. Raises ValueError."""
    known = {section.name for section in SECTIONS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"No section {', '.join(unknown)}; there are {', '.join(sorted(known))}.")
    return [section for section in SECTIONS if not names or section.name in names]


def groups(sections):
    """Groups of sections, one after the other; the members of a group run at the same time."""
    alone = [[section] for section in sections if section.alone]
    beside = [section for section in sections if not section.alone and not section.last]
    last = [section for section in sections if section.last]
    return [*alone, *filter(None, (beside, last))]


def time_for(group, later, left_s):
    """Seconds for a group: its limit, but the least is left for those after it. 0: not enough to begin."""
    reserved = sum(max(section.least_s for section in one) for one in later)
    share = min(max(section.limit_s for section in group), left_s - reserved)
    least = min(section.least_s for section in group)
    if share < least <= left_s:
        share = least  # those after it may fall away; this one may not
    return share if share >= least else 0.0
