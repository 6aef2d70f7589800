"""A recorded training step: when each gradient was ready, what buckets cost, and how fast the machine is.

Recorded by ``bagua.torch_api.train.recorder``; read by ``bagua advise`` and by the tuner. As JSON it has a version.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bagua.base.errors import ConfigError

FORMAT = "bagua step profile"
VERSION = 1
# Bytes of an element, by dtype.
ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16},
}


@dataclass(frozen=True)
class Gradient:
    """Gradient of one parameter. ``ready_ns``: from the start of backward until its gradient was there. ``rows``: of
    the parameter as a matrix (PowerSGD); 1 for vectors.
    """

    name: str
    dtype: str
    numel: int
    ready_ns: int
    rows: int = 1

    @property
    def bytes(self) -> int:
        return self.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class BucketCost:
    """The exchange of one bucket as it was measured, medians in seconds. ``wire_s``: from the moment when all ranks of
    the host had submitted it until its result was there. ``exposed_s``: of that, while the rank waited."""

    bytes: int
    wire_s: float
    exposed_s: float


@dataclass(frozen=True)
class CodecSpeed:
    """Speed of a codec in one thread, in bytes of float32 per second. ``decode``: a message onto a vector."""

    encode: float
    decode: float


@dataclass(frozen=True)
class Speeds:
    """The machine, measured; bytes per second, on one thread.

    ``reduce``: in-host reduction, bytes of one rank's vector. ``memory``: one pass of ``a += b``, bytes of b.
    ``socket``: bytes that leave a host while as many arrive, encrypted as between hosts: what the processor can.
    ``operation_s``: seconds of one operation that moves next to nothing. ``codecs``: by name.
    """

    reduce: float
    memory: float
    socket: float
    operation_s: float
    codecs: Mapping[str, CodecSpeed] = field(default_factory=dict)


# Measured on the reference machine of docs/performance.md.
# Stands in where a machine was not measured.
REFERENCE = Speeds(
    reduce=4e9,
    memory=8e9,
    socket=1.2e9,
    operation_s=1e-4,
    codecs={
        "fp16": CodecSpeed(10e9, 10e9),
        "bf16": CodecSpeed(10e9, 10e9),
        "fp8_e4m3": CodecSpeed(7e9, 8e9),
        "fp8_e5m2": CodecSpeed(7e9, 8e9),
        "minmax8": CodecSpeed(8e9, 10e9),
        "int4": CodecSpeed(6e9, 8e9),
        "int2": CodecSpeed(5e9, 9e9),
        "onebit": CodecSpeed(8e9, 10e9),
        "topk": CodecSpeed(1.5e9, 8e9),
    },
)


@dataclass(frozen=True)
class StepProfile:
    """Profile of a training step of one rank, medians over some steps, without what communication costs.

    ``parameters``: in the order in which their gradients came. ``forward_ns``: from the start of the forward pass to
    that of backward. ``backward_ns``: to the last gradient. ``rest_ns``: optimizer, data, everything else.
    ``hosts``, ``ranks_per_host``, ``island_size``: of the job that was recorded; with islands ``parameters`` are this
    rank's parts. ``cores``: that the ranks of a host share. ``threads``:
    computing threads of a rank. ``steps``: how many were recorded. ``buckets``: of the recorded job, in their order.
    """

    parameters: tuple[Gradient, ...]
    forward_ns: int
    backward_ns: int
    rest_ns: int
    hosts: int = 1
    ranks_per_host: int = 1
    cores: int = 1
    threads: int = 1
    steps: int = 1
    buckets: tuple[BucketCost, ...] = ()
    speeds: Speeds = REFERENCE
    island_size: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError for values that can't be."""
        if not self.parameters:
            raise ConfigError("A step profile needs at least one parameter. [BG005]")
        _check_parameters(self.parameters)
        for name in ("forward_ns", "backward_ns", "rest_ns"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} of a step profile is {getattr(self, name)}: it must not be negative. [BG005]"
                )
        for name in ("hosts", "ranks_per_host", "cores", "threads", "steps", "island_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a step profile is {getattr(self, name)}: it must be at least 1. [BG005]")
        speeds = {name: getattr(self.speeds, name) for name in ("reduce", "memory", "socket")}
        for name, codec in self.speeds.codecs.items():
            speeds |= {f"{name}.encode": codec.encode, f"{name}.decode": codec.decode}
        for bucket in self.buckets:
            if not all(map(math.isfinite, dataclasses.astuple(bucket))):  # JSON as Python reads it has NaN and Infinity
                raise ConfigError(f"A bucket of a step profile has a number that can't be: {bucket}. [BG005]")
        for name, speed in speeds.items():
            if not 0 < speed < math.inf:
                raise ConfigError(f"Speed {name} of a step profile is {speed}: it must be a positive number. [BG005]")

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)

    @property
    def compute_s(self) -> float:
        """Seconds of a step that communicates nothing."""
        return (self.forward_ns + self.backward_ns + self.rest_ns) / 1e9

    def to_json(self) -> str:
        """Writes the profile as text; ``from_json`` reads it."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return json.dumps(document, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "the step profile") -> StepProfile:
        """The profile that ``to_json`` wrote. Raises ConfigError, which begins with ``where``, for anything else."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where} is no JSON: {error}. [BG005]") from None
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise ConfigError(f"{where} is no step profile: bagua advise --save FILE writes one. [BG005]")
        version = document.pop("version", None)
        if version != VERSION:
            raise ConfigError(
                f"{where} has version {version!r}, and this Bagua reads version {VERSION}: record it again with "
                "bagua advise --save. [BG005]"
            )
        try:
            speeds = document.get("speeds", {})
            if "codecs" in speeds:
                speeds["codecs"] = {name: CodecSpeed(**one) for name, one in speeds["codecs"].items()}
            parts: dict[str, Any] = {
                "parameters": tuple(Gradient(**one) for one in document["parameters"]),
                "buckets": tuple(BucketCost(**one) for one in document.get("buckets", ())),
                "speeds": Speeds(**speeds) if speeds else REFERENCE,
            }
            return cls(**{**document, **parts})
        except ConfigError as error:
            raise ConfigError(f"{where}: {error} [BG005]") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{where} is damaged ({error}): record it again with bagua advise --save. [BG005]"
            ) from None

    def save(self, path: Path) -> None:
        """Writes the file whole or not at all. Raises ConfigError with the reason."""
        temporary = path.with_name(f"{path.name}.new")
        try:
            temporary.write_text(self.to_json())
            temporary.replace(path)
        except OSError as error:
            raise ConfigError(f"The step profile can't be written to {path}: {error.strerror}. [BG005]") from error

    @classmethod
    def load(cls, path: Path) -> StepProfile:
        """Reads the file. Raises ConfigError with the reason."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"The step profile {path} can't be read: {reason}. [BG005]") from error
        return cls.from_json(text, str(path))


def _check_parameters(parameters: tuple[Gradient, ...]) -> None:
    seen: set[str] = set()
    for one in parameters:
        if one.dtype not in ITEM_BYTES:
            raise ConfigError(f"Parameter {one.name} has dtype {one.dtype!r}. Known: {', '.join(ITEM_BYTES)}. [BG005]")
        if one.numel < 0 or one.ready_ns < 0 or one.rows < 1:
            raise ConfigError(f"Parameter {one.name} has a number that can't be: {one}. [BG005]")
        if one.name in seen:
            raise ConfigError(f"Parameter {one.name} is in the step profile twice. [BG005]")
        seen.add(one.name)
