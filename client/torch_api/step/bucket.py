"""Base of all buckets: parameters, named slots in memory that can be communicated, and a plan over them.

That is memory which the daemon sees, or ordinary memory of the parameters' CUDA device. The host waits before it reads
the latter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from bagua.algorithms import AllReduce, Local, Neighbours, Plan
from bagua.algorithms.low_rank import LowRank
from bagua.algorithms.plan import COPY, KEEP, ON_CHANGE, RESCALE, SCRATCH, ZERO, Step
from bagua.torch_api.cuda.port import PORT
from bagua.torch_api.job.connection import NOWHERE, Place
from bagua.torch_api.step.execution import Execution, NotReady, join_all
from bagua.torch_api.step.low_rank import low_rank_for
from bagua.torch_api.step.phases import bucket_name

Allocate = Callable[[int, torch.dtype], tuple[torch.Tensor, Place]]


class Region(NamedTuple):
    """Memory of a slot: its elements; room behind them for the tail (none in buckets without one); where it begins.

    ``place`` is NOWHERE for memory that the daemon does not see.
    """

    flat: torch.Tensor
    tail: torch.Tensor
    place: Place


class PlanBucket:
    """Base of all buckets. A subclass says where the slots with a meaning of their own lie (``region``).

    ``room``: elements behind each communicated slot, for the tail.
    """

    room = 0
    reserved: tuple[str, ...] = ()
    guarded = False  # whether open and shut do anything
    repeats = False  # in an elastic job its plan is part of a unit
    starts_alone = False  # when it is full, in the order of a pass, and not at a moment of the algorithm's

    def __init__(self, name: str, parameters: Sequence[tuple[str, torch.Tensor]], allocate: Allocate) -> None:
        """``parameters``: names and tensors, of one dtype, at least one."""
        self.name = name
        self.label = bucket_name(name)
        self.names = [label for label, _ in parameters]
        self.tensors = [tensor for _, tensor in parameters]
        self.dtype = self.tensors[0].dtype
        self.device = self.tensors[0].device
        self.on_device = PORT.cuda.holds(self.tensors[0])
        self.elements = sum(tensor.numel() for tensor in self.tensors)
        self.plan: Plan | None = None
        self.execution: Execution = NotReady(name)
        self.join_buckets: Callable[[Sequence[PlanBucket]], object] = join_all
        self._allocate = allocate
        self._added: dict[str, Region] = {}
        self._on_change: dict[str, str] = {}

    # Slots

    def add_slot(
        self, name: str, elements: int | None = None, *, communicated: bool = True, on_change: str = KEEP
    ) -> torch.Tensor:
        """A new slot of zeros of the bucket's dtype, flat: ``elements`` long, or as long as the parameters together.

        ``communicated``: steps other than ``Local`` use it. ``on_change``: see ``bagua.algorithms.plan.ON_CHANGE``.
        Raises ValueError if there is one of that name.
        """
        if on_change not in ON_CHANGE:
            raise ValueError(
                f"on_change of slot {name!r} is {on_change!r}: choose one of {', '.join(ON_CHANGE)}. [BG307]"
            )
        if name in self._added or name in self.reserved:
            raise ValueError(f"Bucket {self.name} has a slot {name!r} already: choose another name. [BG307]")
        count = self.elements if elements is None else elements
        if count < (0 if elements is None else 1):  # a rank may have nothing of a bucket of shards
            raise ValueError(f"Slot {name!r} of bucket {self.name} can't have {count} elements. [BG307]")
        if communicated:
            self._added[name] = region_of(*self._allocate(count + self.room, self.dtype), count)
        else:
            self._added[name] = region_of(torch.zeros(count, dtype=self.dtype, device=self.device), NOWHERE, count)
        self._on_change[name] = on_change
        return self._added[name].flat

    def follow_members(self, before: int, now: int) -> None:
        """Brings slots from ``before`` ranks of an elastic job to ``now``, each by its rule. Called while nothing is
        under way."""
        self.execution.put_back()
        for name, rule in self._on_change.items():
            if rule == ZERO:
                self._added[name].flat.zero_()
            elif rule == RESCALE:
                self._added[name].flat.mul_(now / before)

    @property
    def kept_slots(self) -> list[str]:
        """Names of added slots that have an element for each of the parameters."""
        return [name for name, region in self._added.items() if region.flat.numel() == self.elements]

    @property
    def slots_for_newcomers(self) -> list[torch.Tensor]:
        """Added slots that a rank which joins takes over from the others."""
        return [self._added[name].flat for name, rule in self._on_change.items() if rule in (COPY, RESCALE)]

    @property
    def lasting_slots(self) -> dict[str, tuple[bool, torch.Tensor]]:
        """Added slots that a checkpoint holds, by name: whether they are the same on all ranks, and the slot."""
        return {
            name: (rule in (COPY, RESCALE), self._added[name].flat)
            for name, rule in self._on_change.items()
            if rule != SCRATCH
        }

    def slot(self, name: str) -> torch.Tensor:
        """The flat tensor of a slot. Raises ValueError if there is none of that name."""
        return self.region(name).flat

    def views(self, name: str) -> Sequence[torch.Tensor]:
        """The parameters' parts of a slot that is as long as they are together, in their shapes."""
        flat = self.slot(name)
        if flat.numel() != self.elements:
            raise ValueError(
                f"Slot {name!r} of bucket {self.name} has {flat.numel()} elements, the parameters {self.elements}: it "
                "has no part for each of them. [BG307]"
            )
        return views_like(flat, self.tensors)

    @property
    def low_rank(self) -> LowRank:
        return low_rank_for(self.tensors[0])

    def region(self, name: str) -> Region:
        """Memory of a slot. Raises ValueError if there is none of that name."""
        if name in self.reserved:  # FRESH: the others have a region of their own
            raise ValueError(f"{name!r} of bucket {self.name} does not lie in one piece: use views({name!r}). [BG307]")
        if name not in self._added:
            known = ", ".join([*self.reserved, *self._added])
            raise ValueError(f"Bucket {self.name} has no slot {name!r}. It has: {known}. [BG307]")
        return self._added[name]

    # The plan

    def set_plan(self, plan: Plan) -> None:
        """Sets the plan that the bucket runs. Raises ValueError for slots that don't exist or don't fit together."""
        for step in plan.steps:
            self._check(step)
        self.plan = plan

    def _check(self, step: Step) -> None:
        names = dict.fromkeys((*step.reads, *step.writes))
        if isinstance(step, Local):
            # FRESH has no region; that of WEIGHT takes memory as soon as it is asked for.
            names = {name: None for name in names if name not in self.reserved}
        regions = {name: self.region(name) for name in names}
        if isinstance(step, Local):
            return
        for name, region in regions.items():
            if region.place == NOWHERE:
                raise ValueError(f"{step} can't use slot {name!r}, which was added with communicated=False. [BG307]")
        lengths = {name: region.flat.numel() for name, region in regions.items()}
        if isinstance(step, (AllReduce, Neighbours)) and len(set(lengths.values())) > 1:
            raise ValueError(f"{step} needs slots of one length; in bucket {self.name} they have {lengths}. [BG307]")

    def start(self) -> None:
        """Runs the plan's steps up to and including the first that communicates, and returns without waiting for it.

        Raises BaguaError if it has been started and not been joined.
        """
        self.execution.start()

    def done(self) -> bool:
        """Returns True if the step that ``start`` began is over. True if not started."""
        return self.execution.done()

    def join(self) -> None:
        """Waits, and runs the rest of the plan. Nothing if it has not been started."""
        self.join_buckets([self])

    def refresh(self) -> None:
        """Called before a plan starts: brings the slots with a meaning up to date."""

    def open(self, step: Step) -> None:
        """Called before each step, if ``guarded``."""

    def shut(self, step: Step, changed: bool) -> None:
        """Called after each step, if ``guarded``. ``changed``: this rank took part in it."""

    def release(self) -> None:
        """Lets go of the memory now, rather than when the garbage collector comes by, but not before operations that
        have begun are over. The bucket can't be used any more."""
        self.execution.abandon()
        self.execution = NotReady(self.name)
        self._added.clear()
        self._on_change.clear()


def region_of(memory: torch.Tensor, place: Place, elements: int) -> Region:
    """The region of a slot of ``elements`` in ``memory``; the rest is room for the tail."""
    return Region(memory[:elements], memory[elements:], place)


def views_like(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Parts of ``flat``, one after the other, in the shapes of ``tensors``."""
    found, offset = [], 0
    for tensor in tensors:
        found.append(view_like(flat, offset, tensor))
        offset += tensor.numel()
    return found


def view_like(buffer: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """``parameter.numel()`` elements of ``buffer`` in the shape of ``parameter``, and in its strides where these are
    dense: optimizers are fastest when both agree."""
    # Device meta: strides of a contiguous tensor, without memory.
    strides = parameter.stride() if is_dense(parameter) else torch.empty(parameter.shape, device="meta").stride()
    return torch.as_strided(buffer, parameter.shape, strides, buffer.storage_offset() + offset)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns True if the elements fill numel() places without gaps or overlap, in whatever order of dimensions."""
    expected = 1
    # The stride of a dimension of one element says nothing.
    for stride, size in sorted(
        (stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
