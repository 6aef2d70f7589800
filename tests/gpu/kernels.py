"""Section: every kernel gives the bits that the CPU's codec gives, sums stand beside float64, and each runs near the
bandwidth of a plain copy. ``--quick``: few sizes and no times, for compute-sanitizer."""

import sys
import time

import numpy as np

import bagua.csrc
from gpu.findings import section
from gpu.kernel_abi import Work
from gpu.kernel_card import CpuCard, card_of

DENSITY = 1311  # of topk: 2 %
SIZES = (1, 31, 127, 1000, 16384, 16385, 1 << 20 | 3)
QUICK_SIZES = (1, 127, 16385)
BIG = 64 << 20  # elements: 256 MiB of float32
REHEARSED_BIG = 1 << 18
HUGE = (1 << 31) + 3 * 16384 + 77  # elements: an index has more than 32 bits, a byte's place more than 33
REHEARSED_HUGE = 5 * 16384 + 77
TARGET = 0.85  # of the copy's bandwidth
FLOATS = {"float32": np.float32, "float64": np.float64, "float16": np.float16, "bfloat16": np.uint16}
SMALL_FLOATS = {
    "fp16": (np.uint16, 1 << 12),
    "bf16": (np.uint16, 1 << 15),
    "fp8_e4m3": (np.uint8, 1 << 19),
    "fp8_e5m2": (np.uint8, 1 << 20),
}
"""Codec: its codes, and how far a float is from one when it lies between two, in its bits."""
INTEGERS = {"int32": np.int32, "int64": np.int64, "uint8": np.uint8}
EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def numbers(count, seed):
    """Normal numbers of different sizes, with zeros and a tiny one."""
    random = np.random.default_rng(seed)
    made = random.standard_normal(count, np.float32) * np.float32(10) ** random.integers(-3, 3, count).astype(
        np.float32
    )
    made[::97] = 0
    made[::1009] = 1e-40
    return made


def shifted(card, array, shift):
    """A copy that begins ``shift`` elements behind an address that every access fits."""
    return card.part(card.put(np.concatenate([np.zeros(shift, array.dtype), array])), shift * array.itemsize)


def many_numbers(count, seed):
    """The same again and again: more than the caches of a card hold, but quickly made."""
    return np.resize(numbers(min(count, 1 << 22), seed), count)


def widened(array, dtype):
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def narrowed(array, dtype):
    """Float32 numbers as this dtype (bfloat16: its bits, cut off)."""
    if dtype == "bfloat16":
        return (array.view(np.uint32) >> 16).astype(np.uint16)
    return array.astype(FLOATS[dtype])


class Codecs:
    def __init__(self, card, findings):
        self.core = bagua.csrc.load()
        self.names = [name for name in self.core.CODECS if name != "none"]
        self.card, self.cpu = card, CpuCard()
        self.findings = findings

    def density(self, name):
        return DENSITY if name == "topk" else 0

    def length(self, name, count):
        return int(self.core.encoded_bytes(self.core.CODECS[name], count, self.density(name)))

    def run(self, card, name, count, variant):
        """All results of one variant on one card: message, decoded, residual (as far as there are)."""
        codec, density, length = self.core.CODECS[name], self.density(name), self.length(name, count)
        shift = count % 2  # elements by which the vectors miss an address that every access fits
        raw, other = shifted(card, numbers(count, 1), shift), shifted(card, numbers(count, 2), shift)
        first, second = card.put(np.zeros(length, np.uint8)), card.put(np.zeros(length, np.uint8))
        decoded, message = shifted(card, np.full(count, 7, np.float32), shift), card.put(np.zeros(length, np.uint8))
        residual = shifted(card, numbers(count, 3), shift) if variant == "residual" else None
        both = {"codec": codec, "count": count, "density": density}
        card.transcode(Work(**both, raw=[raw], message=first, decoded=[decoded]))
        card.transcode(Work(**both, raw=[other], message=second))
        more = {
            "encode": Work(**both, raw=[raw], message=message, decoded=[decoded]),
            "in place": Work(**both, raw=[raw, other], message=message, decoded=[raw]),
            "decode": Work(**both, encoded=[first], decoded=[decoded]),
            "decode and add": Work(**both, raw=[other], encoded=[first, second], scale=1 / 3, decoded=[decoded]),
            "decode, add, encode": Work(
                **both, raw=[raw], encoded=[second], scale=0.5, message=message, decoded=[decoded]
            ),
            "residual": Work(**both, raw=[raw, other], residual=residual, message=message, decoded=[decoded]),
        }
        card.transcode(more[variant])
        result = raw if variant == "in place" else decoded
        found = [card.get(message, np.uint8, length), card.get(result, np.uint32, count)]
        if residual is not None:
            found.append(card.get(residual, np.uint32, count))
        card.free_all()
        return found

    def compare(self, sizes):
        for name in self.names:
            for variant in ("encode", "in place", "decode", "decode and add", "decode, add, encode", "residual"):
                with self.findings.guarded(f"{name}: {variant}"):
                    wrong = [
                        (count, int(sum((mine != its).sum() for mine, its in zip(one, two, strict=True))))
                        for count in sizes
                        for one, two in [
                            (self.run(self.card, name, count, variant), self.run(self.cpu, name, count, variant))
                        ]
                        if any((mine != its).any() for mine, its in zip(one, two, strict=True))
                    ]
                    self.findings.check(
                        f"{name}: {variant}, bits of the CPU", not wrong, f"(count, wrong): {wrong}"[:300]
                    )

    def special_values(self):
        """Infinities and NaN go through as on the CPU."""
        values = numbers(4096, 5)
        values[[3, 600, 2000, 3500]] = [np.inf, -np.inf, np.nan, -np.nan]
        for name in self.names:
            with self.findings.guarded(f"{name}: special values"):
                found = []
                for card in (self.card, self.cpu):
                    message = card.put(np.zeros(self.length(name, 4096), np.uint8))
                    raw = card.put(values)
                    work = Work(self.core.CODECS[name], 4096, self.density(name), raw=[raw], message=message)
                    card.transcode(work)
                    found.append(card.get(message, np.uint8, self.length(name, 4096)))
                    card.free_all()
                self.findings.check(f"{name}: special values", bool((found[0] == found[1]).all()))

    def conversions(self):
        """Small floats, which the card's own instructions convert: every code is decoded, and what lies on, beside and
        between all of them encoded, with the CPU's bits (decoded fp8 passes a NaN on by a product: it is any)."""
        for name, (code, between) in SMALL_FLOATS.items():
            with self.findings.guarded(f"{name}: every code"):
                codes = np.arange(1 << 8 * code().itemsize, dtype=code)
                message = np.concatenate([codes, codes]).view(np.uint8)  # whole blocks of 512
                if code is np.uint8:
                    message = np.concatenate([message, np.ones(1, np.float32).view(np.uint8)])  # the block's scale
                count = 2 * len(codes)
                both = {"codec": self.core.CODECS[name], "count": count, "density": 0}
                read, written = [], []
                for card in (self.card, self.cpu):
                    decoded = card.put(np.zeros(count, np.float32))
                    card.transcode(Work(**both, encoded=[card.put(message)], decoded=[decoded]))
                    read.append(card.get(decoded, np.float32, count))
                    bits = read[0].view(np.uint32)
                    there = card.put(np.zeros(len(message), np.uint8))
                    written.append([])
                    for step in (0, 1, between - 1, between, between + 1, -1, -between):
                        near = (bits + np.uint32(step % (1 << 32))).view(np.float32)
                        card.transcode(Work(**both, raw=[card.put(np.nan_to_num(near, 0, 0, 0))], message=there))
                        written[-1].append(card.get(there, np.uint8, len(message)))
                    card.free_all()
                other = read[0].view(np.uint32) != read[1].view(np.uint32)
                if code is np.uint8:
                    other &= ~(np.isnan(read[0]) & np.isnan(read[1]))
                self.findings.check(f"{name}: every code decoded", not other.any(), f"{np.flatnonzero(other)[:5]}")
                wrong = [int((one != two).sum()) for one, two in zip(*written, strict=True)]
                self.findings.check(f"{name}: all about every code encoded", not any(wrong), f"wrong bytes: {wrong}")


def reductions(card, findings, sizes):
    """Every dtype and operation against the CPU's bits; sums against float64."""
    core = bagua.csrc.load()
    for dtype, kind in {**FLOATS, **INTEGERS}.items():
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX") if dtype in FLOATS else ("SUM", "MAX", "BOR", "BXOR"):
            with findings.guarded(f"reduce {dtype} {op}"):
                wrong = []
                for count in sizes:
                    arrays = [numbers(count, seed) for seed in range(3)]
                    inputs = (
                        [narrowed(array, dtype) for array in arrays]
                        if dtype in FLOATS
                        else [(np.abs(array) * 5 % 100).astype(kind) for array in arrays]
                    )
                    found = []
                    for one in (card, CpuCard()):
                        places = [shifted(one, array, count % 2) for array in inputs]
                        output = one.put(np.zeros(count, kind))
                        one.reduce(core.DTYPES[dtype], core.OPS[op], places, output, count, 3)
                        found.append(one.get(output, kind, count))
                        one.free_all()
                    if (found[0].view(np.uint8) != found[1].view(np.uint8)).any():
                        wrong.append(f"{count}: other bits than the CPU")
                    if dtype in FLOATS and op in ("SUM", "AVG"):
                        terms = [widened(array, dtype) for array in inputs]
                        exact = sum(terms) / (3 if op == "AVG" else 1)
                        allowed = 4 * EPSILON[dtype] * sum(np.abs(term) for term in terms) + 1e-7
                        if (np.abs(widened(found[0], dtype) - exact) > allowed).any():
                            wrong.append(f"{count}: far from float64")
                findings.check(f"reduce {dtype} {op}", not wrong, "; ".join(wrong))


def odd_halves(card, findings):
    """Every float16 and bfloat16 through the device's own conversions, with the CPU's bits. Only what makes a NaN or
    passes it on by an operation may give it other ones, and a sum, mean or product is one, of a single input, too."""
    core = bagua.csrc.load()
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype, infinity in (("float16", 0x7C00), ("bfloat16", 0x7F80)):
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            for others in ([], [np.roll(every, 12345)], [np.roll(every, 12345), every[::-1].copy()]):
                title = f"every {dtype}: {op} of {len(others) + 1}"
                with findings.guarded(title):
                    found = []
                    for one in (card, CpuCard()):
                        places = [one.put(array) for array in (every, *others)]
                        output = one.put(np.zeros_like(every))
                        one.reduce(core.DTYPES[dtype], core.OPS[op], places, output, len(every), 3 if others else 1)
                        found.append(one.get(output, np.uint16, len(every)))
                        one.free_all()
                    wrong = found[0] != found[1]
                    if op not in ("MIN", "MAX"):
                        wrong &= ~((found[0] & 0x7FFF > infinity) & (found[1] & 0x7FFF > infinity))
                    findings.check(title, not wrong.any(), f"{wrong.sum()} wrong: {every[wrong][:5]}")


def huge(codecs, card, findings, count):
    """The end of very long vectors, to which numbers are copied on the card, beside the CPU's work on that end alone.
    It takes 10 bytes of the card's memory for each element."""
    some = numbers(min(1 << 22, count // 2), 7)
    begin = (count // 16384 - 2) * 16384
    end = some[np.arange(begin, count) % len(some)]
    raw, decoded, message = card.empty(4 * count), card.empty(4 * count), card.empty(2 * count + 64)
    card.copy(raw, card.put(some), some.nbytes)
    done = len(some)
    while done < count:
        card.copy(card.part(raw, 4 * done), raw, 4 * min(done, count - done))
        done += min(done, count - done)
    for name in codecs.names:
        with findings.guarded(f"{name}: {count} elements"):
            both = {"codec": codecs.core.CODECS[name], "density": codecs.density(name)}
            card.transcode(Work(**both, count=count, raw=[raw], message=message))
            card.transcode(Work(**both, count=count, encoded=[message], decoded=[decoded]))
            found = card.get(card.part(decoded, 4 * begin), np.uint32, len(end))
            its, message_of_end = codecs.cpu.put(end), codecs.cpu.empty(codecs.length(name, len(end)))
            wanted = codecs.cpu.empty(end.nbytes)
            codecs.cpu.transcode(Work(**both, count=len(end), raw=[its], message=message_of_end, decoded=[wanted]))
            wrong = int((found != wanted.view(np.uint32)).sum())
            findings.check(f"{name}: {count} elements", not wrong, f"{wrong} wrong at the end")
    with findings.guarded(f"mean of {count} elements"):
        card.reduce(codecs.core.DTYPES["float32"], codecs.core.OPS["AVG"], [raw, raw], decoded, count, 2)
        found = card.get(card.part(decoded, 4 * begin), np.float32, len(end))
        findings.check(f"mean of {count} elements", bool((found == end).all()))
    card.free_all()


def works(codecs, card, count):
    """(codec, what, bytes moved, work) of everything that is timed."""
    raw, other, residual, decoded = (card.put(many_numbers(count, seed)) for seed in range(4))
    floats = 4 * count
    for name in codecs.names:
        length = codecs.length(name, count)
        first, second, message = (card.put(np.zeros(length, np.uint8)) for _ in range(3))
        both = {"codec": codecs.core.CODECS[name], "count": count, "density": codecs.density(name)}
        for one in (first, second):
            card.transcode(Work(**both, raw=[raw], message=one))
        yield name, "encode", floats + length, lambda w=Work(**both, raw=[raw], message=message): card.transcode(w)
        work = Work(**both, raw=[raw], residual=residual, message=message)
        yield name, "encode, residual", 3 * floats + length, lambda w=work: card.transcode(w)
        work = Work(**both, encoded=[first], decoded=[decoded])
        yield name, "decode", floats + length, lambda w=work: card.transcode(w)
        work = Work(**both, raw=[other], encoded=[first, second], scale=1 / 3, message=message)
        yield name, "decode, add, encode", floats + 3 * length, lambda w=work: card.transcode(w)
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float16", 2), ("float64", 8)):
        elements = min(count, 4 * count // size)
        sources = [card.put(narrowed(many_numbers(elements, seed), dtype)) for seed in range(3)]
        for inputs in (2, 3):
            of = (codecs.core.DTYPES[dtype], codecs.core.OPS["AVG"], sources[:inputs], decoded, elements, inputs)
            nbytes = (inputs + 1) * size * elements
            yield f"mean of {inputs} {dtype}", "reduce", nbytes, lambda of=of: card.reduce(*of)


def bandwidth(codecs, card, findings, count):
    """GB/s of each kernel (bytes read and written) beside a copy's in the same rounds."""
    here, there = card.empty(4 * count), card.empty(4 * count)
    copy = lambda: card.copy(there, here, 4 * count)  # noqa: E731
    for name, what, nbytes, work in works(codecs, card, count):
        with findings.guarded(f"{name}: {what}"):
            work()
            repeats = max(2, min(50, int(0.02 / max(card.seconds(work, 1), 1e-6))))
            rounds = [(card.seconds(copy, 10), card.seconds(work, repeats)) for _ in range(5)]
            copied = 8 * count / sorted(one for one, _ in rounds)[2] / 1e9
            reached = nbytes / sorted(one for _, one in rounds)[2] / 1e9
            findings.row(
                "bandwidth",
                codec=name,
                work=what,
                **{"B/element": nbytes / count, "GB/s": reached, "copy GB/s": copied, "share": reached / copied},
                target="met" if reached >= TARGET * copied else "missed",
            )
    card.free_all()


def work(findings, device, quick):
    """Everything, or with ``quick`` the checks at few sizes."""
    card = card_of(device)
    codecs = Codecs(card, findings)
    begun = time.perf_counter()
    card.load()
    took = 1000 * (time.perf_counter() - begun)
    findings.note(f"All kernels were loaded in {took:.0f} ms, as a rank does when it starts.")
    sizes = QUICK_SIZES if quick or device != "cuda" else SIZES
    codecs.compare(sizes)
    codecs.special_values()
    codecs.conversions()
    reductions(card, findings, sizes)
    odd_halves(card, findings)
    if not quick:
        findings.note("Bytes are those that must be read and written once. Five rounds in turn with the copy; medians.")
        huge(codecs, card, findings, HUGE if device == "cuda" else REHEARSED_HUGE)
        bandwidth(codecs, card, findings, BIG if device == "cuda" else REHEARSED_BIG)


if __name__ == "__main__":
    sys.exit(section("kernels", lambda findings, given: work(findings, given.device, given.quick), __doc__, "--quick"))
