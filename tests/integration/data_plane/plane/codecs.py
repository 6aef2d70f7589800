"""Largest error of an all-reduce that crosses between hosts encoded: see csrc/core/codec/codec.h."""

import numpy as np

NAMES = ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "int2", "onebit", "topk")
DENSITY = 6554  # of 65536, for topk: a tenth
WIDEST = 16384  # elements of the largest block of a format

ROUNDOFF = {"fp16": 2.0**-11, "bf16": 2.0**-8, "fp8_e4m3": 2.0**-4, "fp8_e5m2": 2.0**-3}  # unit roundoff of elements
# Half of the smallest step: of the type itself, or as a share of the largest magnitude of a block that is scaled so
# that it uses the upper half of the type's range (e4m3: 2^-10 of 224; e5m2: 2^-17 of 28672).
UNDERFLOW = {"fp16": 2.0**-25, "bf16": 2.0**-134}
SCALED_UNDERFLOW = {"fp8_e4m3": 2.0**-10 / 224, "fp8_e5m2": 2.0**-17 / 28672}


def python_codec(name):
    """The codec as training code names it, without error feedback: an all-reduce alone has nowhere to keep it."""
    from bagua.algorithms.codec import Codec

    return Codec(name, density=0.1 if name == "topk" else None, error_feedback=False)


def bound(name, magnitude, spread):
    """How far encoding and decoding may move values of these magnitudes, of which the largest is ``spread`` above the
    smallest. They hold whole blocks, or more than one, so that their extremes are at least those of any block."""
    largest = float(np.max(magnitude, initial=0.0))
    if name in UNDERFLOW:
        return ROUNDOFF[name] * magnitude + UNDERFLOW[name]
    if name in SCALED_UNDERFLOW:
        return ROUNDOFF[name] * magnitude + SCALED_UNDERFLOW[name] * largest
    if name == "minmax8":  # half a step of 255
        return np.full(magnitude.shape, spread / 255 * 0.5 + 2.0**-21 * largest)
    if name == "int4":  # half a step of 7
        return np.full(magnitude.shape, largest / 7 * 0.5 + 2.0**-21 * largest)
    if name in ("int2", "onebit"):  # a mean magnitude instead of the element, perhaps with the other sign
        return magnitude + largest
    return magnitude  # topk: the element, or nothing


def all_reduce_bound(name, partials, divisor):
    """The same for an all-reduce: every host encodes its partial sum, the owner of a block the sum of what it decoded.
    ``partials`` are the sums of each host; results are divided by ``divisor``."""
    spreads = [float(np.ptp(partial)) if partial.size else 0.0 for partial in partials]
    each = [bound(name, np.abs(partial), spread) for partial, spread in zip(partials, spreads, strict=True)]
    arrived = np.sum(each, axis=0) / divisor
    total = np.sum(partials, axis=0) / divisor
    # A value that is encoded again is already off by `arrived`.
    spread = float(np.ptp(total)) + 2 * float(np.max(arrived)) if total.size else 0.0
    rounding = 2.0**-22 * np.sum(np.abs(partials), axis=0)
    return 1.01 * (arrived + bound(name, np.abs(total) + arrived, spread) + rounding) + 1e-30
