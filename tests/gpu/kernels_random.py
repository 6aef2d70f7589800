"""Section: random calls of the kernels on tensors of torch, each from a seed of its own: codecs, sizes, numbers of
inputs, offsets from 16 bytes, values of every kind, results in place of inputs.

All bits are compared with the core's ``transcode`` and ``reduce`` on the CPU (a NaN with any NaN where decoding is a
product), and sums of floats with float64. The seed of a failed call is told: ``--seed`` begins there. ``--device
fake``: the same source over an emulated device.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import bagua.csrc
from gpu.findings import Findings, section
from gpu.kernel_abi import Kernels, Work
from gpu.kernel_card import emulated_library
from gpu.section_options import parser

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
PRODUCTS = ("fp8_e4m3", "fp8_e5m2", "minmax8", "int4")  # whose decoding passes a NaN on by an operation: it is any
MOST_WRONG = 10
MOST_S, REHEARSED_S = 30.0, 10.0


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

    def as_work(self) -> Work:
        """For the library."""
        return Work(
            self.codec,
            self.count,
            self.density,
            self.raw,
            self.encoded,
            self.scale,
            self.residual,
            self.message,
            self.decoded,
        )


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
        odd = torch.tensor(
            [float("inf"), float("-inf"), float("nan"), -float("nan"), 0.0, -0.0, 1e-42, 3.4e38, 65520.0]
        )
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
    """Random calls of the library, on tensors of ``device``."""

    def __init__(self, kernels: Kernels, core: Any, device: str) -> None:
        self.kernels, self.core, self.device = kernels, core, device

    def on_device(self, launch: Callable[[int], None]) -> None:
        """Launches on the current stream and waits for the result."""
        if self.device != "cuda":
            launch(0)
            return
        launch(torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()

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
        on_device = copied(call, self.device, offset)
        self.on_cpu(call)
        self.on_device(lambda stream: self.kernels.transcode(on_device.as_work(), stream))
        any_nan = call.codec in (self.core.CODECS[name] for name in PRODUCTS)
        for mine, its in zip(call.tensors(), on_device.tensors(), strict=True):
            found = its.cpu()
            if mine.dtype == torch.uint8:
                wrong = mine != found
            else:
                wrong = mine.view(torch.int32) != found.view(torch.int32)
                if any_nan:
                    wrong &= ~(mine.isnan() & found.isnan())
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
        placed = [at_offset(source, offset, self.device) for source in sources]
        elsewhere = at_offset(torch.zeros_like(expected), choose.choice((offset, 0)), self.device)
        output = placed[-1] if choose.random() < 0.3 else elsewhere
        self.on_device(lambda stream: self.kernels.reduce(number, op_number, placed, output, count, divisor, stream))
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

    def run(self, seconds: float, seed: int) -> tuple[int, list[str]]:
        """Calls until the time is over, or until MOST_WRONG were wrong: how many, and what was wrong."""
        end = time.monotonic() + seconds
        calls, wrong = 0, []
        while len(wrong) < MOST_WRONG and (calls < 2 or time.monotonic() < end):
            check = self.transcode if (seed + calls) % 4 else self.reduce
            problem = check(seed + calls)
            wrong += [problem] if problem else []
            calls += 1
        return calls, wrong


def work(findings: Findings, given: Any) -> None:
    """As many calls as there is time for."""
    begun = time.monotonic()
    if given.device == "cpu":
        findings.note("The core would be compared with itself.")
        return
    kernels = Kernels(str(bagua.csrc.kernels_library()) if given.device == "cuda" else emulated_library())
    checker = Checker(kernels, bagua.csrc.load(), "cuda" if given.device == "cuda" else "cpu")
    torch.set_num_threads(1)
    seconds = given.seconds * 0.7 - (time.monotonic() - begun)
    calls, wrong = checker.run(min(seconds, MOST_S if given.device == "cuda" else REHEARSED_S), given.seed)
    findings.check("random calls give the bits of the CPU", not wrong, "; ".join(wrong)[:2000])
    findings.row("random calls", calls=calls, wrong=len(wrong), seed=given.seed)


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--seed", type=int, default=0, help="of the first call")
    return made.parse_args(words)


if __name__ == "__main__":
    sys.exit(section("kernels_random", work, options()))
