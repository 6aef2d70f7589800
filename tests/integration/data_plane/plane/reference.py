"""Inputs, right results, and how far from them a result may lie.

The input of a rank is a window of a table whose length is prime: any part of it can be made at once, at any size, and
chunks that were swapped do not look alike. A reference is made in float64 (float64 itself: in long double); integers
are exact, overflow wraps around.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PERIOD = 1_000_003
MAX_RANKS = 8

STORED = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16, "int32": np.int32,
    "int64": np.int64, "uint8": np.uint8, "bool": np.uint8, "int8": np.int8, "int16": np.int16,
}  # fmt: skip
SIZE = {name: np.dtype(kind).itemsize for name, kind in STORED.items()}
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int32", "int64", "uint8", "int8", "int16")
OPS = {
    **{dtype: ("SUM", "PRODUCT", "MIN", "MAX", "AVG") for dtype in FLOATS},
    **{dtype: ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BOR", "BAND", "BXOR") for dtype in INTEGERS},
    "bool": ("MIN", "MAX", "BOR", "BAND", "BXOR"),
}
FUNCTIONS = {
    "SUM": np.add, "AVG": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
    "BOR": np.bitwise_or, "BAND": np.bitwise_and, "BXOR": np.bitwise_xor,
}  # fmt: skip

# Unit roundoff of the dtype, and half of its smallest step: 2^-p, and 2^(e_min - p) of IEEE 754.
ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53, "float16": 2.0**-11, "bfloat16": 2.0**-8}
UNDERFLOW = {
    "float32": 2.0**-150, "float64": np.longdouble(2.0) ** -1075, "float16": 2.0**-25, "bfloat16": 2.0**-134,
}  # fmt: skip


def to_bits(values, dtype):
    """Values -> how ``dtype`` stores them; bfloat16 as uint16, rounded to nearest even."""
    if dtype != "bfloat16":
        return values.astype(STORED[dtype])
    single = values.astype(np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


def from_bits(bits, dtype):
    """The numbers that are stored, in a type that computes: long double for float64, float64 for the other floating
    point types, integers as they are."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float64":
        return bits.astype(np.longdouble)
    return bits.astype(np.float64) if dtype in FLOATS else bits


def table(dtype, op, special):
    """``PERIOD`` values that are stored as ``dtype`` and suit ``op``. With ``special`` some are nan, infinite,
    denormal or zeros of both signs."""
    if dtype in FLOATS:
        return _table(dtype, "PRODUCT" if op == "PRODUCT" else "SUM", special)
    return _table(dtype, "AVG" if op == "AVG" else "SUM", False)


@functools.cache
def _table(dtype, op, special):
    generator = np.random.default_rng([SIZE[dtype], len(dtype), len(op)])
    if dtype == "bool":
        return generator.integers(0, 2, PERIOD, dtype=np.uint8)
    if dtype in INTEGERS:
        limits = np.iinfo(STORED[dtype])
        share = MAX_RANKS if op == "AVG" else 1  # the sum before the division must not wrap around
        return generator.integers(limits.min // share, limits.max // share, PERIOD, STORED[dtype], endpoint=True)
    if op == "PRODUCT":
        values = generator.uniform(0.5, 2.0, PERIOD) * generator.choice([-1.0, 1.0], PERIOD)
    else:
        values = generator.standard_normal(PERIOD) * np.exp2(generator.integers(-6, 5, PERIOD))
    if special:
        tiny = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149, "float64": 2.0**-1074}[dtype]
        exotic = [np.nan, np.inf, -np.inf, 0.0, -0.0, tiny, -tiny, 3 * tiny, 100 * tiny]
        places = generator.integers(0, PERIOD, PERIOD // 4)
        values[places] = generator.choice(exotic, len(places))
    return to_bits(values, dtype)


def fill(out, first, rank, seed, values):
    """Elements [first, first + len(out)) of the input of ``rank`` in the case number ``seed``."""
    at = (first + 7919 * seed + 104_729 * rank) % PERIOD
    done = 0
    while done < len(out):
        n = min(len(out) - done, PERIOD - at)
        out[done : done + n] = values[at : at + n]
        done, at = done + n, 0


def window(first, count, rank, seed, values):
    """The same as a new array."""
    out = np.empty(count, values.dtype)
    fill(out, first, rank, seed, values)
    return out


def reduced(parts, op, dtype):
    """(the right result of reducing what is stored in ``parts``, the sum of the magnitudes)."""
    with np.errstate(all="ignore"):
        numbers = np.stack([from_bits(part, dtype) for part in parts])
        total = FUNCTIONS[op].reduce(numbers, axis=0, dtype=numbers.dtype)
        if dtype not in FLOATS:
            # AVG truncates toward zero.
            return (np.sign(total) * (np.abs(total) // len(parts)) if op == "AVG" else total), total
        return (total / len(parts) if op == "AVG" else total), np.abs(numbers).sum(axis=0)


def bound(dtype, op, ranks, hosts, want, magnitude):
    """How far from ``want`` a result may lie.

    SUM, AVG: (n - 1) u_acc sum|x| for additions in any order (Higham, Accuracy and Stability, 4.2). Half precision adds
    in float32 and rounds to its own precision once per host, where a partial sum travels, so hosts * u sum|x| more. AVG
    divides all that by n and rounds once more. PRODUCT: relative to the result, and every rounding counts: one of each
    host's partial product, and one of each product of partials (hosts - 1 of them, when hosts halve and double). MIN,
    MAX and integers: exact. 1 % on top for products of roundoffs.
    """
    if dtype not in FLOATS or op in ("MIN", "MAX"):
        return np.zeros(want.shape)
    half = dtype in ("float16", "bfloat16")
    adding = ROUNDOFF["float64" if dtype == "float64" else "float32"] * (ranks - 1 + (op == "AVG"))
    storing = ROUNDOFF[dtype] * (hosts + (hosts - 1 if op == "PRODUCT" else 0)) if half else 0.0
    steps = UNDERFLOW[dtype] * (hosts + 1)
    scale = np.abs(want) if op == "PRODUCT" else magnitude / (ranks if op == "AVG" else 1)
    with np.errstate(all="ignore"):
        return 1.01 * ((adding + storing) * scale + steps) + (ROUNDOFF[dtype] * np.abs(want) if op == "AVG" else 0.0)


def compare(got, want, allowed):
    """(index of the first wrong element or -1, largest error as a share of what is allowed). Not-a-number and
    infinities must be where they are expected."""
    with np.errstate(all="ignore"):
        if got.dtype.kind in "iub":
            wrong = got != want
            return (int(np.argmax(wrong)) if wrong.any() else -1), 0.0
        error = np.abs(got - want)
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        wrong = ~(same | (np.isfinite(want) & (error <= allowed)))
        inexact = ~same & np.isfinite(error) & (allowed > 0)
        share = float(np.max(error[inexact] / allowed[inexact])) if inexact.any() else 0.0
        return (int(np.argmax(wrong)) if wrong.any() else -1), share
