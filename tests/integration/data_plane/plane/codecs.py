"""How far from the right result an all-reduce that crosses between hosts encoded may lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from plane.reference import Array

NAMES = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "onebit", "topk")
DENSITY = 6554  # of 65536, for topk: a tenth

# Unit roundoff of the elements.
ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}
# Half of the smallest step: of the type itself, or as a share of the largest magnitude of a block that is scaled so
# that it uses the upper half of the type's range (e4m3: 2^-10 of 224; e5m2: 2^-17 of 28672).
UNDERFLOW = {"fp16": 2.0**-25, "bf16": 2.0**-134}
SCALED_UNDERFLOW = {"fp8_e4m3": 2.0**-10 / 224, "fp8_e5m2": 2.0**-17 / 28672}


def python_codec(name: str) -> Any:
    """The codec as training code names it, without error feedback: an all-reduce alone has nowhere to keep it."""
    from bagua.algorithms.codec import Codec

    return Codec(name, density=0.1 if name == "topk" else None, error_feedback=False)


def bound(name: str, values: Array) -> Array:
    """How far encoding and decoding may move each of ``values`` (which hold whole blocks, or more than one)."""
    magnitude, largest = np.abs(values), float(np.max(np.abs(values), initial=0.0))
    if name in UNDERFLOW:
        return ROUNDOFF[name] * magnitude + UNDERFLOW[name]
    if name in SCALED_UNDERFLOW:
        return ROUNDOFF[name] * magnitude + SCALED_UNDERFLOW[name] * largest
    if name == "minmax8":  # half a step of 255, and rounding of the block's parameters
        return np.full(values.shape, float(np.ptp(values) if values.size else 0.0) / 255 * 0.5 + 2.0**-22 * largest)
    if name == "int4":  # half a step of 7
        return np.full(values.shape, largest / 7 * 0.5 + 2.0**-8 * largest)
    if name == "onebit":  # a mean magnitude instead of the element
        return magnitude + largest
    return magnitude  # topk: the element, or nothing


def all_reduce_bound(name: str, partials: list[Array], divisor: int) -> Array:
    """The same for an all-reduce: every host encodes its partial sum, the owner of a block the sum of what it decoded.
    ``partials`` are the sums of each host; results are divided by ``divisor``."""
    each = [bound(name, partial) for partial in partials]
    arrived = np.sum(each, axis=0) / divisor
    total = np.sum(partials, axis=0) / divisor
    # What is encoded again is off by `arrived` already.
    return 1.01 * (arrived + bound(name, np.abs(total) + arrived) + 2.0**-22 * np.abs(total)) + 1e-30
