"""A rank that joined an engine, and values of every dtype."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bagua.csrc import build

# The core of the test's process: sources that change meanwhile must not make every rank build.
core = build._load(Path(json.loads(sys.argv[1])["core"]))
KINDS, DTYPES, OPS, CODECS = core.KINDS, core.DTYPES, core.OPS, core.CODECS
SEGMENT = 4 << 20
NUMPY = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16, "int32": np.int32,
    "int64": np.int64, "uint8": np.uint8, "bool": np.uint8, "int8": np.int8, "int16": np.int16,
}  # fmt: skip
SIZE = {name: np.dtype(kind).itemsize for name, kind in NUMPY.items()}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def pause() -> None:
    sys.stdin.readline()


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 or int64 values -> the bits of ``dtype``; bfloat16 as uint16, rounded to nearest even."""
    if dtype != "bfloat16":
        return values.astype(NUMPY[dtype])
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return bits.astype(np.float64) if dtype.startswith("float") else bits.astype(np.int64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def numbers(rank: int, count: int, dtype: str, seed: int) -> np.ndarray:
    """Small whole numbers, so that every dtype holds every result exactly but means."""
    generator = np.random.default_rng([seed, rank])
    low, high = (0, 2) if dtype == "bool" else (1, 3)
    return encode(generator.integers(low, high, count).astype(np.float64), dtype)


def reduced(parts: list[np.ndarray], op: str, dtype: str) -> np.ndarray:
    """The right result, in float64 (int64 for integers)."""
    stack = np.stack([decode(part, dtype) for part in parts])
    if op == "AVG":
        total = stack.sum(axis=0)
        return np.trunc(total / len(parts)).astype(np.int64) if total.dtype == np.int64 else total / len(parts)
    functions: dict[str, Any] = {
        "SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum,
        "BOR": np.bitwise_or, "BAND": np.bitwise_and, "BXOR": np.bitwise_xor,
    }  # fmt: skip
    return functions[op].reduce(stack, axis=0)


class Rank:
    """A joined rank with one segment for sources and one for destinations."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.rank: int = task["rank"]
        self.world: int = task["world"]
        self.native = core.Rank(data_socket=task["socket"], token=bytes.fromhex(task["token"]), rank=self.rank)
        self.src = self.native.alloc(SEGMENT)
        self.dst = self.native.alloc(SEGMENT)

    def view(self, segment: Any, dtype: str, count: int, offset: int = 0) -> np.ndarray:
        return np.frombuffer(segment, dtype=NUMPY[dtype], count=count, offset=offset)

    def start(self, kind: str, dtype: str = "float32", **more: Any) -> int:
        ticket: int = self.native.submit(
            comm=more.pop("comm", 0), kind=KINDS[kind], dtype=DTYPES[dtype], op=OPS[more.pop("op", "SUM")],
            count=more.pop("count", 0), src=(self.src.id, more.pop("src", 0)),
            dst=tuple(more.pop("at", (self.src.id if more.pop("same", False) else self.dst.id, 0))), **more,
        )  # fmt: skip
        return ticket

    def run(self, kind: str, dtype: str = "float32", **more: Any) -> tuple[int, int, int]:
        times = self.native.wait(self.start(kind, dtype, **more), 60.0)
        assert times is not None, f"{kind} took more than 60 s"
        return tuple(times)  # type: ignore[return-value]
