"""Codecs on one thread: encoding, decoding-and-adding, and both fused, beside copying memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from bagua.algorithms.codec import Codec
from bagua.base.errors import BaguaError
from bagua.bench.ranks import harness
from bagua.bench.units import size_text
from bagua.csrc import load

TURN_S = 0.01
MOST_REPEATS = 1000
MEMCPY = "memcpy"


def memory_of(tensor: torch.Tensor) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a contiguous tensor as a buffer; the tensor must outlive it."""
    return (ctypes.c_char * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())


class Subject:
    """Codec with its vectors: normal data ``x``, its message, and an accumulator."""

    def __init__(self, name: str, count: int, x: torch.Tensor) -> None:
        self.core = load()
        self.count = count
        self.codec = Codec(name)
        self.number, self.density = self.core.CODECS[name], self.codec.density_units
        self.message_bytes: int = self.core.encoded_bytes(self.number, count, self.density)
        self.x = x
        self.message, self.other = (torch.zeros(self.message_bytes, dtype=torch.uint8) for _ in range(2))
        self.sum, self.residual = torch.zeros(count), torch.zeros(count)

    def _call(self, **buffers: Any) -> None:
        self.core.transcode(self.number, self.count, density=self.density, **buffers)

    def encode(self) -> None:
        self._call(raw=[memory_of(self.x)], message=memory_of(self.message))

    def decode_add(self) -> None:
        total = memory_of(self.sum)
        self._call(raw=[total], encoded=[memory_of(self.message)], decoded=[total])

    def recode(self) -> None:
        """The work of a block's owner: the mean of its own vector and a message, with error feedback where the codec
        wants it, becomes a message for all and the result."""
        feedback = {"residual": memory_of(self.residual)} if self.codec.error_feedback else {}
        self._call(
            raw=[memory_of(self.x)],
            encoded=[memory_of(self.message)],
            scale=0.5,
            message=memory_of(self.other),
            decoded=[memory_of(self.sum)],
            **feedback,
        )

    def error(self) -> float:
        """Relative L2 error of one encoding. Raises BaguaError if the message decodes to nonsense."""
        self.encode()
        self._call(encoded=[memory_of(self.message)], decoded=[memory_of(self.sum)])
        found = float((self.sum - self.x).double().norm() / self.x.double().norm())
        if not found < 1:  # "not": NaN is wrong, too
            raise BaguaError(f"{self.codec.name} over {self.count} elements has a relative error of {found}. [BG001]")
        return found


def repeated(action: Callable[[], None]) -> Callable[[], float]:
    """A variant: seconds per call of as many calls as fill a turn."""
    action()  # a first time, uncounted
    repeats = max(1, min(MOST_REPEATS, int(TURN_S / max(1e-9, harness.seconds(action)))))

    def turn() -> float:
        def all_of_them() -> None:
            for _ in range(repeats):
                action()

        return harness.seconds(all_of_them) / repeats

    return turn


def measure_size(config: dict[str, Any], nbytes: int) -> list[dict[str, Any]]:
    """Median seconds of every codec on vectors of ``nbytes``."""
    count = max(1, nbytes // 4)
    torch.manual_seed(0)
    x, copy = torch.randn(count), torch.zeros(count)
    subjects = {name: Subject(name, count, x) for name in config["codecs"]}
    errors = {name: subject.error() for name, subject in subjects.items()}

    def copy_memory() -> None:
        ctypes.memmove(copy.data_ptr(), x.data_ptr(), count * 4)

    variants = {MEMCPY: repeated(copy_memory)}
    for name, subject in subjects.items():
        for step in ("encode", "decode_add", "recode"):
            variants[f"{name} {step}"] = repeated(getattr(subject, step))
    seconds = harness.medians(harness.interleave(variants, config["seconds"], config["rounds"]))
    return [
        {
            "bytes": count * 4,
            "codec": name,
            "message_bytes": subject.message_bytes,
            "error": errors[name],
            "memcpy_s": seconds[MEMCPY],
        }
        | {f"{step}_s": seconds[f"{name} {step}"] for step in ("encode", "decode_add", "recode")}
        for name, subject in subjects.items()
    ]


def measure(config: dict[str, Any]) -> dict[str, Any] | None:
    rows = []
    for step, nbytes in enumerate(config["sizes"]):
        harness.progress(step, len(config["sizes"]), size_text(nbytes))
        rows += measure_size(config, nbytes)
    harness.progress(len(config["sizes"]), len(config["sizes"]), "done")
    return {"rows": rows}


if __name__ == "__main__":
    harness.run(measure)
