"""The first steps of an algorithm that does better from common ground: an all-reduce of gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bagua.algorithms.base import AlgorithmImpl, DataParallel, ProcessGroup
from bagua.algorithms.checks import check_count
from bagua.algorithms.codec import Codec
from bagua.algorithms.plan import AllReduce, Plan


@dataclass(frozen=True)
class WarmUp:
    """``steps`` steps with an all-reduce of gradients, encoded between hosts by ``codec`` (None: as they are)."""

    steps: int
    codec: Codec | None

    @classmethod
    def of(cls, steps: int, codec: Codec | str | None, name: str = "warmup_steps") -> WarmUp:
        """Raises TypeError and ValueError for what can't be; ``name`` is that of the argument with the steps."""
        found = cls(check_count(name, steps, 0), Codec.of(codec))
        if found.codec is not None and found.steps == 0:
            raise ValueError(f"warmup_codec without {name} makes no sense: there is no warm-up to encode in. [BG304]")
        return found

    def plan(self) -> Plan:
        """Returns the plan of a bucket of gradients."""
        return Plan((AllReduce("AVG", codec=self.codec),))


NO_WARM_UP = WarmUp(0, None)


class WarmedUpImpl(AlgorithmImpl):
    """``warm_up.steps`` synchronised passes with gradient all-reduce, then passes that compress gradients.

    ``steps``: synchronised passes so far.
    """

    newcomers_take = ("steps", "compresses")

    def __init__(self, process_group: ProcessGroup, warm_up: WarmUp) -> None:
        super().__init__(process_group)
        self.warm_up = warm_up
        self.steps = 0
        self.compresses = warm_up.steps == 0

    def need_reset(self) -> bool:
        """True once, when the warm-up is over."""
        if self.compresses or self.steps < self.warm_up.steps:
            return False
        self.compresses = True
        return True

    def init_post_backward_hook(self, bagua_ddp: DataParallel) -> Callable[[], None]:
        """Returns a function that counts steps."""

        def after_backward() -> None:
            bagua_ddp.finish_backward()
            self.steps += 1  # a pass that failed does not count

        return after_backward
