"""Checks and measures the library of CUDA kernels (csrc/cuda) with torch: prints one JSON object.

    python tests/integration/cuda/kernels_check.py --seconds 60 --elements 67108864

1. Random calls for ``--seconds``: codecs, sizes, numbers of inputs, offsets from 16 bytes, values of every kind,
   results in place of inputs. All bits are compared with the core's ``transcode`` and ``reduce`` on the CPU (a NaN
   with any NaN), and sums of floats with float64. The seed of a failed call is printed: ``--seed`` begins there.
2. With ``--elements``: GB/s of every codec and reduction, bytes counted once per access, beside a device-to-device copy
   of the same size timed in turn with it.

``--device cpu`` rehearses all of it on tensors of the CPU, for a library that works on those.
Exit status: 0; 1 if a call gave other bits.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_INPUTS = 16
FLOATS = {"float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
}
EPSILONS = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
KINDS = ("usual", "equal", "tiny", "odd", "huge")
WITH_NAN = ("odd", "huge")  # only where y is formed without arithmetic, which chooses among NaN as it likes
WARM_UP_S, ROUNDS, ROUND_S = 0.02, 5, 0.02


class Transcode(ctypes.Structure):
    """BaguaTranscode of csrc/cuda/kernels.h."""

    _fields_ = (
        ("codec", ctypes.c_uint8),
        ("density", ctypes.c_uint16),
        ("count", ctypes.c_uint64),
        ("raw", ctypes.POINTER(ctypes.c_void_p)),
        ("raws", ctypes.c_int32),
        ("encoded", ctypes.POINTER(ctypes.c_void_p)),
        ("encodeds", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("residual", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("decoded", ctypes.POINTER(ctypes.c_void_p)),
        ("decodeds", ctypes.c_int32),
    )


class Reduce(ctypes.Structure):
    """BaguaReduce of csrc/cuda/kernels.h."""

    _fields_ = (
        ("dtype", ctypes.c_uint8),
        ("op", ctypes.c_uint8),
        ("count", ctypes.c_uint64),
        ("inputs", ctypes.POINTER(ctypes.c_void_p)),
        ("input_count", ctypes.c_int32),
        ("output", ctypes.c_void_p),
        ("divisor", ctypes.c_int64),
    )


@dataclass
class Call:
    """One transcode. ``raw``, ``residual`` and ``decoded`` are float32, messages uint8, all on one device."""

    codec: int
    density: int
    count: int
    raw: list[torch.Tensor]
    encoded: list[torch.Tensor]
    scale: float
    residual: torch.Tensor | None
    message: torch.Tensor | None
    decoded: list[torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        """Everything that may have changed, and what must not have."""
        single = [tensor for tensor in (self.residual, self.message) if tensor is not None]
        return [*self.raw, *self.encoded, *self.decoded, *single]


def addresses(tensors: Sequence[torch.Tensor]) -> Any:
    """Their addresses as an array of C pointers."""
    return (ctypes.c_void_p * max(1, len(tensors)))(*(tensor.data_ptr() for tensor in tensors))


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Kernels:
    """The library, on the current stream of ``device``. Raises RuntimeError with the CUDA error's number."""

    def __init__(self, path: str, device: str) -> None:
        self._library = ctypes.CDLL(path)
        self.device = device

    def _run(self, name: str, work: ctypes.Structure) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        code = getattr(self._library, name)(ctypes.byref(work), ctypes.c_void_p(stream))
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def transcode(self, call: Call) -> None:
        raw, encoded, decoded = addresses(call.raw), addresses(call.encoded), addresses(call.decoded)
        self._run(
            "bagua_kernels_transcode",
            Transcode(
                call.codec,
                call.density,
                call.count,
                raw,
                len(call.raw),
                encoded,
                len(call.encoded),
                call.scale,
                address(call.residual),
                address(call.message),
                decoded,
                len(call.decoded),
            ),
        )

    def reduce(
        self, dtype: int, op: int, inputs: Sequence[torch.Tensor], output: torch.Tensor, divisor: int = 1
    ) -> None:
        given = Reduce(dtype, op, output.numel(), addresses(inputs), len(inputs), output.data_ptr(), divisor)
        self._run("bagua_kernels_reduce", given)

    def finish(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Of one call, by the device's clock."""
        if self.device != "cuda":
            begin = time.perf_counter()
            for _ in range(repeats):
                work()
            return (time.perf_counter() - begin) / repeats
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        for _ in range(repeats):
            work()
        end_event.record()
        end_event.synchronize()
        return float(begin_event.elapsed_time(end_event)) / 1e3 / repeats


def values(count: int, kind: str, generator: torch.Generator) -> torch.Tensor:
    """``count`` float32 on the CPU. usual: of many sizes; equal: few different ones; tiny: down to denormals; odd: with
    infinities, NaN and zeros; huge: up to the largest."""
    made = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-6, 6, (count,), generator=generator)
    if kind == "equal":
        return torch.randint(-2, 3, (count,), generator=generator) * 0.25
    if kind == "tiny":
        return made * 2.0**-120 * 2.0 ** -torch.randint(0, 12, (count,), generator=generator)
    if kind == "huge":
        return torch.clamp(made.double() * 2.0**122, -3.4e38, 3.4e38).float()
    if kind == "odd" and count:
        odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-42, 3.4e38, 65520.0])
        places = torch.randint(0, count, (1 + count // 700,), generator=generator)
        made[places] = odd[torch.randint(0, len(odd), (len(places),), generator=generator)]
    return made


def at_offset(tensor: torch.Tensor, offset: int, device: str) -> torch.Tensor:
    """A copy that begins ``offset`` elements behind an address that every access fits."""
    space = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
    space[offset:].copy_(tensor)
    return space[offset:]


def copied(call: Call, device: str, offset: int) -> Call:
    """The same call on another device. A result in place of an input stays there."""
    moved = {tensor.data_ptr(): at_offset(tensor, offset, device) for tensor in call.raw}
    return Call(
        call.codec,
        call.density,
        call.count,
        [moved[tensor.data_ptr()] for tensor in call.raw],
        [message.to(device, copy=True) for message in call.encoded],
        call.scale,
        None if call.residual is None else at_offset(call.residual, offset, device),
        None if call.message is None else call.message.to(device, copy=True),
        [
            moved[tensor.data_ptr()] if tensor.data_ptr() in moved else at_offset(tensor, offset, device)
            for tensor in call.decoded
        ],
    )


class Checker:
    """Random calls, each from a seed of its own."""

    def __init__(self, kernels: Kernels, core: Any) -> None:
        self.kernels, self.core = kernels, core

    def on_cpu(self, call: Call) -> None:
        """The same call by the core."""
        self.core.transcode(
            call.codec,
            call.count,
            raw=[tensor.numpy() for tensor in call.raw],
            encoded=[tensor.numpy() for tensor in call.encoded],
            scale=call.scale,
            residual=None if call.residual is None else call.residual.numpy(),
            message=None if call.message is None else call.message.numpy(),
            decoded=[tensor.numpy() for tensor in call.decoded],
            density=call.density,
        )

    def random_call(self, seed: int) -> tuple[Call, str]:
        """A call on the CPU, and how its values look."""
        choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        codec = choose.choice(sorted(self.core.CODECS.values()))
        density = choose.choice((1, 655, 30000, 65535)) if codec == self.core.CODECS["topk"] else 0
        count = choose.choice((choose.randrange(1, 70), choose.randrange(1, 5000), choose.randrange(1, 200_000)))
        plain = choose.random() < 0.5
        raws = 1 if plain else choose.randrange(0, 5)
        encodeds = 0 if plain else choose.choice((0, 1, 2, 3, MOST_INPUTS - raws))
        kind = choose.choice(KINDS if plain else [kind for kind in KINDS if kind not in WITH_NAN])
        length = self.core.encoded_bytes(codec, count, density)
        raw = [values(count, kind, generator) for _ in range(raws)]
        messages = [torch.zeros(length, dtype=torch.uint8) for _ in range(encodeds)]
        for message in messages:
            y = values(count, kind, generator)
            self.on_cpu(Call(codec, density, count, [y], [], 1.0, None, message, []))
        residual = values(count, "usual", generator) if not plain and choose.random() < 0.5 else None
        decoded = [torch.zeros(count) for _ in range(choose.randrange(0, 4))]
        if decoded and raw and choose.random() < 0.5:
            decoded[0] = raw[0]
        wants = residual is not None or not decoded or choose.random() < 0.7
        out = torch.zeros(length, dtype=torch.uint8) if wants else None
        scale = 1.0 if plain else choose.choice((1.0, 0.5, 1 / 3))
        return Call(codec, density, count, raw, messages, scale, residual, out, decoded), kind

    def transcode(self, seed: int) -> str | None:
        """None, or what is wrong."""
        call, kind = self.random_call(seed)
        offset = random.Random(seed).choice((0, 0, 0, 1, 3))
        on_device = copied(call, self.kernels.device, offset)
        self.on_cpu(call)
        self.kernels.transcode(on_device)
        self.kernels.finish()
        for mine, its in zip(call.tensors(), on_device.tensors(), strict=True):
            found = its.cpu()
            if mine.dtype == torch.uint8:
                wrong = mine != found
            else:
                wrong = (mine.view(torch.int32) != found.view(torch.int32)) & ~(mine.isnan() & found.isnan())
            if bool(wrong.any()):
                return (
                    f"transcode, --seed {seed}: codec {call.codec}, density {call.density}, count {call.count}, "
                    f"{kind}, {len(call.raw)} + {len(call.encoded)} inputs, offset {offset}: {int(wrong.sum())} wrong "
                    f"of {wrong.numel()}, first {int(wrong.nonzero()[0])}"
                )
        return None

    def reduce(self, seed: int) -> str | None:
        """None, or what is wrong."""
        choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        name = choose.choice(sorted({**FLOATS, **INTEGERS}))
        floating = name in FLOATS
        op = choose.choice(
            ("SUM", "AVG", "PRODUCT", "MIN", "MAX") if floating else ("SUM", "AVG", "MAX", "BOR", "BXOR")
        )
        count, inputs = choose.choice((choose.randrange(1, 300), choose.randrange(1, 200_000))), choose.randrange(1, 10)
        divisor = choose.choice((1, 3, 8))
        if floating:
            sources = [torch.randn(count, generator=generator).to(FLOATS[name]) for _ in range(inputs)]
        else:
            sources = [
                torch.randint(-100, 100, (count,), generator=generator).to(INTEGERS[name]) for _ in range(inputs)
            ]
        number, op_number = self.core.DTYPES[name], self.core.OPS[op]
        expected, size = torch.zeros_like(sources[0]), sources[0].element_size()
        as_bytes = [source.view(torch.uint8).numpy() for source in sources]
        self.core.reduce(number, op_number, as_bytes, expected.view(torch.uint8).numpy(), count, divisor)
        offset = choose.choice((0, 0, 1))
        placed = [at_offset(source, offset, self.kernels.device) for source in sources]
        elsewhere = at_offset(torch.zeros_like(expected), choose.choice((offset, 0)), self.kernels.device)
        output = placed[-1] if choose.random() < 0.3 else elsewhere
        self.kernels.reduce(number, op_number, placed, output, divisor)
        self.kernels.finish()
        found = output.cpu()
        where = f"reduce, --seed {seed}: {name} {op}, {inputs} inputs of {count}, divisor {divisor}"
        if not torch.equal(expected.view(torch.uint8), found.view(torch.uint8)):
            return f"{where}: other bits than the CPU ({size} bytes an element)"
        if floating and op in ("SUM", "AVG"):
            exact = sum((source.double() for source in sources), torch.zeros(count, dtype=torch.float64))
            allowed = inputs * EPSILONS[name] * sum((source.double().abs() for source in sources), torch.ones(()))
            if bool(((found.double() - exact / (divisor if op == "AVG" else 1)).abs() > allowed).any()):
                return f"{where}: far from float64"
        return None

    def run(self, seconds: float, seed: int) -> dict[str, Any]:
        """Calls until the time is over; stops at the tenth that is wrong."""
        end = time.monotonic() + seconds
        calls, wrong = 0, []
        while len(wrong) < 10 and (calls < 2 or time.monotonic() < end):
            check = self.transcode if (seed + calls) % 4 else self.reduce
            problem = check(seed + calls)
            wrong += [problem] if problem else []
            calls += 1
        return {"calls": calls, "wrong": wrong}


@dataclass(frozen=True)
class Timed:
    """Something to time, and the bytes that it has to move."""

    name: str
    nbytes: int
    work: Callable[[], Any]


def timed(kernels: Kernels, core: Any, count: int) -> Iterator[Timed]:
    """Every codec's four uses, and reductions."""
    floats = [torch.randn(count, device=kernels.device) for _ in range(4)]
    for name, codec in core.CODECS.items():
        density = 655 if name == "topk" else 0
        length = core.encoded_bytes(codec, count, density)
        messages = [torch.zeros(length, dtype=torch.uint8, device=kernels.device) for _ in range(8)]
        for k, message in enumerate(messages):
            kernels.transcode(Call(codec, density, count, [floats[k % 3]], [], 1.0, None, message, []))

        def call(
            nbytes: int,
            what: str,
            raws: int,
            encodeds: int,
            residual: bool,
            encodes: bool,
            decodeds: int,
            fixed: tuple[Any, ...] = (name, codec, density, messages),
        ) -> Timed:
            title, number, kept, sources = fixed
            given = Call(
                number,
                kept,
                count,
                floats[:raws],
                sources[:encodeds],
                1.0,
                floats[3] if residual else None,
                sources[7] if encodes else None,
                floats[1 : 1 + decodeds],
            )
            return Timed(f"{title} {what}", nbytes, lambda: kernels.transcode(given))

        yield call(4 * count + length, "encode", 1, 0, False, True, 0)
        yield call(12 * count + length, "encode, residual", 1, 0, True, True, 0)
        yield call(4 * count + length, "decode", 0, 1, False, False, 1)
        yield call(8 * count + 2 * length, "add 1, encode, decode", 1, 1, False, True, 1)
        yield call(8 * count + 8 * length, "add 7, encode, decode", 1, 7, False, True, 1)
    for title, dtype in FLOATS.items():
        for inputs in (1, 2, 4, 8):
            sources = [torch.ones(count, dtype=dtype, device=kernels.device) for _ in range(inputs)]
            output = torch.empty_like(sources[0])
            nbytes = (inputs + 1) * count * output.element_size()
            given = (core.DTYPES[title], core.OPS["SUM"], sources, output)
            yield Timed(f"sum of {inputs} {title}", nbytes, lambda given=given: kernels.reduce(*given))


def bandwidth(kernels: Kernels, core: Any, count: int) -> list[dict[str, Any]]:
    """Medians of rounds in turn with the copy; shares are of the copy's GB/s."""
    here, there = (torch.zeros(count, device=kernels.device) for _ in range(2))
    rows = []
    for one in timed(kernels, core, count):
        kernels.seconds(one.work, 2)
        repeats = max(2, min(100, int(ROUND_S / max(kernels.seconds(one.work, 1), 1e-6))))
        rounds = [
            (kernels.seconds(lambda: there.copy_(here), 10), kernels.seconds(one.work, repeats)) for _ in range(ROUNDS)
        ]
        copy = 8 * count / statistics.median(seconds for seconds, _ in rounds) / 1e9
        reached = one.nbytes / statistics.median(seconds for _, seconds in rounds) / 1e9
        rows.append(
            {
                "what": one.name,
                "bytes_per_element": round(one.nbytes / count, 3),
                "gb_s": round(reached, 1),
                "copy_gb_s": round(copy, 1),
                "share": round(reached / copy, 3),
            }
        )
    return rows


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", help="libbagua_kernels.so; otherwise the one of bagua.csrc, built if need be")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=20.0, help="of random calls")
    parser.add_argument("--seed", type=int, default=0, help="of the first random call")
    parser.add_argument("--elements", type=int, default=0, help="of the vectors whose bandwidth is measured; 0: none")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here; --device cpu rehearses with a library for the CPU.", file=sys.stderr)
        return 2
    import bagua.csrc

    core = bagua.csrc.load()
    kernels = Kernels(given.library or str(bagua.csrc.kernels_library()), given.device)
    name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__}
    report["random"] = Checker(kernels, core).run(given.seconds, given.seed)
    if given.elements > 0:
        report["bandwidth"] = bandwidth(kernels, core, given.elements)
    print(json.dumps(report, indent=1))
    return 1 if report["random"]["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
