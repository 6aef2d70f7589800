"""Codecs: how float32 gradients are encoded where they cross between hosts.

Inside a host nothing is ever encoded: memory is faster than encoding. With h hosts, each owns one block of a bucket.
Every host encodes its sum of the other owners' blocks, y_p = Σ over its ranks [+ e_p]; the owner adds what it gets to
its own sum, divides, encodes the mean, and all hosts decode the same message: replicas stay bit-identical. A host sends
and receives 2(h-1)/h · r · b bytes per step for b bytes of gradients; r is the share that the codec leaves.

Error feedback keeps what encoding lost, e = y - decode(encode(y)), and adds it to the next step's y, so that over steps
nothing is lost; it costs one float32 per element and host. The engine keeps e as long as the bucket lives; passes under
``no_sync`` send nothing and leave it alone.
"""

from __future__ import annotations

from dataclasses import dataclass

NAMES = ("none", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "int2", "onebit", "topk")
NEED_FEEDBACK = frozenset({"int4", "int2", "onebit", "topk"})  # these lose too much without it
DEFAULT_DENSITY = 0.01
_DENSITY_UNITS = 1 << 16


@dataclass(frozen=True)
class Codec:
    """One encoding of float32. Scales, minima and maxima are those of small blocks; r: bytes sent per byte of float32.

    ========  =====  =========================================  ==================================================
    name      r      what an element x becomes                  choose it when
    ========  =====  =========================================  ==================================================
    fp16      1/2    IEEE half; inf beyond 65504                gradients are small, and half the bytes are enough
    bf16      1/2    bfloat16                                   half the bytes are enough; any range
    fp8_e4m3  1/4    8-bit float, scaled by a power of two      elements of a block differ by orders of magnitude
    fp8_e5m2  1/4    the same, less precise, more range         they differ even more
    minmax8   1/4    one of 256 levels from minimum to maximum  the network is the limit: try this first
    int4      1/8    one of 15 levels, symmetric                the network is slow
    int2      1/16   its sign times one of two magnitudes       differences of weights travel over a slow network
    onebit    1/32   its sign times the mean magnitude          the network is very slow
    topk      1.5 d  x if among the largest, else 0             few elements matter
    ========  =====  =========================================  ==================================================

    Args:
        name: One of the above, or "none": float32 as it is.
        density: topk alone: the share d of elements that travel, in (0, 1]; 0.01 by default.
        error_feedback: True adds to the next step what encoding lost. Default: True for int4, int2, onebit and
            topk, which lose too much without it, False for the others.

    Raises ValueError for a name or a value that can't be, TypeError for one of the wrong type.
    """

    name: str
    density: float | None = None
    error_feedback: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"The name of a codec is {self.name!r}: pass one of {', '.join(NAMES)}. [BG303]")
        if self.name not in NAMES:
            raise ValueError(f"There is no codec {self.name!r}. Known: {', '.join(NAMES)}. [BG303]")
        if self.error_feedback is None:
            # The dataclass is frozen: its own fields are set so.
            object.__setattr__(self, "error_feedback", self.name in NEED_FEEDBACK)
        elif not isinstance(self.error_feedback, bool):
            raise TypeError(f"error_feedback is {self.error_feedback!r}: pass True, False or None. [BG303]")
        elif self.error_feedback and self.name == "none":
            raise ValueError("Codec 'none' loses nothing: error_feedback=True has no meaning for it. [BG303]")
        self._check_density()

    def _check_density(self) -> None:
        if self.name != "topk":
            if self.density is not None:
                raise ValueError(
                    f"density={self.density!r} is for codec 'topk'; {self.name!r} sends every element. [BG303]"
                )
            return
        density = DEFAULT_DENSITY if self.density is None else self.density
        if isinstance(density, bool) or not isinstance(density, (int, float)):
            raise TypeError(f"density is {density!r}: pass a number above 0, at most 1. [BG303]")
        if not 0 < density <= 1:
            raise ValueError(f"density is {density!r}: it must be above 0 and at most 1. [BG303]")
        object.__setattr__(self, "density", float(density))

    @property
    def density_units(self) -> int:
        """The density as the core has it: elements kept of 65536, 1 to 65535; 0 for codecs without one."""
        if self.density is None:
            return 0
        # 0 stands for no density, and 65536 does not fit.
        return min(max(round(self.density * _DENSITY_UNITS), 1), _DENSITY_UNITS - 1)

    @classmethod
    def of(cls, value: Codec | str | None) -> Codec | None:
        """``value`` as a Codec: a name stands for the codec with its defaults; None and "none" for none at all."""
        if value is not None and not isinstance(value, (str, Codec)):
            raise TypeError(
                f"codec is a {type(value).__name__}: pass a name ({', '.join(NAMES)}), a Codec or None. [BG303]"
            )
        found = cls(value) if isinstance(value, str) else value
        return None if found is None or found.name == "none" else found
