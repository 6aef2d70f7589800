"""The first steps of an algorithm that does better from common ground: an all-reduce of gradients."""

from __future__ import annotations

from dataclasses import dataclass

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
