"""Promises of every codec, checked with numpy and torch: error bounds, special values, feedback, determinism."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import bagua.csrc

core = bagua.csrc.load()


# name -> elements of a block (1: elements do not depend on each other)
BLOCKS = {
    "none": 1,
    "fp16": 1,
    "bf16": 1,
    "fp8_e4m3": 512,
    "fp8_e5m2": 512,
    "minmax8": 512,
    "int4": 128,
    "int2": 1024,
    "onebit": 1024,
    "topk": 16384,
}
CODECS = list(BLOCKS)
DENSITY = 1311  # of topk here: 2 %
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 3000), st.sampled_from([127, 128, 512, 1024, 16384, 16385, 40000]))
SEEDS = st.integers(0, 2**32 - 1)
EPSILON = 2.0**-24  # relative error of one rounding of float32
quick = settings(max_examples=40, deadline=None)


def aligned(nbytes):
    memory = np.zeros(nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + nbytes]


def density_of(name):
    return DENSITY if name == "topk" else 0


def transcode(name, raw, *, encoded=None, residual=None, scale=1.0):
    """Message and what it decodes to; updates ``residual``."""
    codec, density = core.CODECS[name], density_of(name)
    count = len(raw[0])
    message = aligned(core.encoded_bytes(codec, count, density))
    decoded = np.full(count, 7, np.float32)
    core.transcode(
        codec,
        count,
        raw=raw,
        encoded=encoded or [],
        scale=scale,
        residual=residual,
        message=message,
        decoded=[decoded],
        density=density,
    )
    return message, decoded


def decode(name, message, count):
    decoded = np.full(count, 7, np.float32)
    core.transcode(core.CODECS[name], count, encoded=[message], decoded=[decoded], density=density_of(name))
    return decoded


def values(seed, count, kind):
    random = np.random.default_rng(seed)
    normal = random.standard_normal(count)
    if kind == "tiny":
        normal *= 1e-9
    elif kind == "denormal":
        normal *= 1e-41
    elif kind == "huge":
        normal = random.uniform(-3.4e38, 3.4e38, count)
    elif kind == "scales":
        normal *= 10.0 ** random.integers(-12, 12, count)
    elif kind == "offset":
        normal = 1e6 + random.random(count)
    elif kind == "sparse":
        normal *= random.random(count) < 0.01
    elif kind == "ties":
        normal = random.integers(-2, 3, count).astype(float)
    return normal.astype(np.float32)


KINDS = st.sampled_from(["normal", "tiny", "denormal", "huge", "scales", "offset", "sparse", "ties"])


def blockwise(x, block, function):
    """``function`` ("min", "max") of every element's block, in float64."""
    wide = x.astype(np.float64)
    if not len(x):
        return wide
    parts = [np.full(len(part), getattr(np, function)(part)) for part in np.split(wide, range(block, len(x), block))]
    return np.concatenate(parts)


def bound(name, x):
    wide = np.abs(x.astype(np.float64))
    most = blockwise(np.abs(x), BLOCKS[name], "max")
    if name == "none":
        return np.zeros(len(x))
    if name == "fp16":  # half a step of 11 bits; of subnormals 2^-25; over 65520: infinite
        return np.where(wide >= 65520, np.inf, np.maximum(wide * 2.0**-11, 2.0**-25))
    if name == "bf16":  # half a step of 8 bits
        return np.where(wide >= 3.39e38, np.inf, np.maximum(wide * 2.0**-8, 2.0**-134))
    if name == "fp8_e4m3":  # half a step of 4 bits; of subnormals 2^-10 of a scale of at most most / 224
        return np.maximum(wide * 2.0**-4, np.maximum(most / 224, 2.0**-126) * 2.0**-10)
    if name == "fp8_e5m2":  # half a step of 3 bits; of subnormals 2^-17 of a scale of at most most / 28672
        return np.maximum(wide * 2.0**-3, np.maximum(most / 28672, 2.0**-126) * 2.0**-17)
    if name == "minmax8":  # half a level, and roundings of the size of the largest; ranges under 2^-118 count as 0
        span = blockwise(x, 512, "max") - blockwise(x, 512, "min")
        step = np.where(most >= 2.0**126, span / 255 * (1 + 2.0**-12), span / 255)
        return np.where(span < 2.0**-118, span, step * (0.5 + 2.0**-12) + 4 * EPSILON * most)
    if name == "int4":  # half a level
        return np.where(most < 2.0**-118, most, most / 7 * (0.5 + 2.0**-18))
    if name in ("int2", "onebit"):  # mean magnitudes are at most the largest; int2: means under 2^-118 count as 0
        return most * (1 + 2.0**-12)
    return np.where(decoded_zero_allowed(x), wide, 0)


def decoded_zero_allowed(x):
    """topk: the elements that are not among the k largest of their block, ties decided by position."""
    dropped = np.ones(len(x), bool)
    for start in range(0, len(x), 16384):
        part = np.abs(x[start : start + 16384])
        kept = math.ceil(len(part) * DENSITY / 65536)
        dropped[start + np.argsort(-part, kind="stable")[:kept]] = False
    return dropped


@pytest.mark.parametrize("name", CODECS)
@quick
@given(SEEDS, SIZES, KINDS)
def test_error_is_bounded(name, seed, count, kind):
    x = values(seed, count, kind)
    message, decoded = transcode(name, [x])
    assert len(message) == core.encoded_bytes(core.CODECS[name], count, density_of(name))
    with np.errstate(invalid="ignore"):
        error = np.abs(decoded.astype(np.float64) - x)
    assert np.all((error <= bound(name, x)) | (x == decoded)), (error - bound(name, x)).max()
    assert np.array_equal(decode(name, message, count), decoded)


@quick
@given(SEEDS, SIZES)
@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_halves_have_the_bits_of_torch(name, dtype, seed, count):
    random = np.random.default_rng(seed)
    x = random.integers(0, 2**32, count, dtype=np.uint32).view(np.float32).copy()  # every kind of number
    if count:
        special = np.array(
            [np.inf, -np.inf, 0.0, -0.0, 65504, 65519.99, 65520, 3.4e38, 1e-45, 6e-8, 2.98e-8], np.float32
        )
        x[random.integers(0, count, 20)] = random.choice(special, 20)
    message, decoded = transcode(name, [x])
    theirs = torch.from_numpy(x).to(dtype)
    numbers = ~np.isnan(x)
    assert np.array_equal(message.view(np.int16)[numbers], theirs.view(torch.int16).numpy()[numbers])
    assert np.array_equal(decoded, theirs.float().numpy(), equal_nan=True)


@quick
@given(SEEDS, SIZES, st.sampled_from(["normal", "scales", "huge", "tiny"]))
@pytest.mark.parametrize(
    ("name", "dtype", "largest"), [("fp8_e4m3", torch.float8_e4m3fn, 448.0), ("fp8_e5m2", torch.float8_e5m2, 57344.0)]
)
def test_fp8_has_the_bits_of_torch(name, dtype, largest, seed, count, kind):
    """Of each block, divided by the smallest power of two with which it fits; nothing is rounded up to infinity."""
    brink = np.float32((1.875 if name == "fp8_e4m3" else 1.75) * 2.0**127)
    x = values(seed, count, kind)
    message, _ = transcode(name, [x])
    scales = message[(count + 3) // 4 * 4 :].view(np.float32)
    assert len(scales) == math.ceil(count / 512)
    for b, scale in enumerate(scales):
        block = x[b * 512 : (b + 1) * 512]
        most = float(np.abs(block).max())
        assert most / float(scale) <= largest
        assert scale == 2.0**-126 or most / float(scale) > largest / 2
        block = np.clip(block, -brink, brink)
        theirs = torch.from_numpy(block / scale).to(dtype).view(torch.uint8).numpy()
        assert np.array_equal(message[b * 512 : b * 512 + len(block)], theirs)


@pytest.mark.parametrize("name", CODECS)
@quick
@given(SEEDS, st.integers(1, 3000), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_what_is_not_finite_is_seen_in_its_block_alone(name, seed, count, bad):
    x = values(seed, count, "normal")
    place = int(np.random.default_rng(seed).integers(count))
    clean = transcode(name, [x])[1]
    x[place] = bad
    residual = np.zeros(count, np.float32)
    decoded = transcode(name, [x], residual=residual)[1]
    block = BLOCKS[name]
    inside = np.arange(count) // block == place // block
    assert not np.isfinite(decoded[inside]).all()
    assert not np.isfinite(decoded[place])
    assert np.array_equal(decoded[~inside], clean[~inside])
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("name", ["none", "minmax8", "int2", "onebit"])
@quick
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 2000))
@example(3.4028234663852886e38, 513)
@example(-3.4028234663852886e38, 1024)
@example(1.401298464324817e-45, 100)
def test_constant_blocks_are_exact(name, value, count):
    x = np.full(count, value, np.float32)
    decoded = transcode(name, [x])[1]
    if name in ("int2", "onebit"):  # a mean is not quite a copy
        assert np.all(np.abs(decoded.astype(np.float64) - value) <= abs(value) * 2.0**-12 + 2.0**-148)
    else:
        assert np.array_equal(decoded, x)


def test_no_finite_value_overflows():
    """The largest numbers, of both signs, in one block."""
    largest = np.finfo(np.float32).max
    for name in ("none", "fp8_e4m3", "fp8_e5m2", "minmax8", "int4", "int2", "onebit", "topk"):
        for count in (1, 2, 100, 1024, 3000):
            x = np.full(count, largest, np.float32)
            x[1::2] *= -1
            assert np.isfinite(transcode(name, [x])[1]).all(), (name, count)


@pytest.mark.parametrize("name", CODECS)
@quick
@given(SEEDS, st.integers(1, 3000), st.sampled_from(["normal", "tiny", "sparse", "offset"]))
def test_error_feedback_loses_nothing(name, seed, count, kind):
    """The sum of what was decoded, and the residual, are the sum of what came in, within the roundings."""
    residual = np.zeros(count, np.float32)
    came, went = np.zeros(count), np.zeros(count)
    size = 0.0
    for step in range(5):
        x = values(seed + step, count, kind)
        came += x
        decoded = transcode(name, [x], residual=residual)[1]
        went += decoded
        size = max(size, float(np.abs(decoded).max()), float(np.abs(residual).max()), float(np.abs(x).max()))
    assert np.abs(came - went - residual).max() <= 5 * 3 * EPSILON * size


@quick
@given(SEEDS, st.integers(1, 3000), KINDS)
def test_large_and_small_elements_of_int2_decode_to_their_means(seed, count, kind):
    """codec.h's definition in float64, where no element lies so near the threshold that rounding decides."""
    x = values(seed, count, kind)
    decoded = transcode("int2", [x])[1].astype(np.float64)
    for start in range(0, count, 1024):
        magnitude, found = np.abs(x[start : start + 1024].astype(np.float64)), decoded[start : start + 1024]
        threshold = 1.375 * magnitude.mean()
        if threshold < 2.0**-115 or np.any(np.abs(magnitude - threshold) <= 1e-5 * threshold):
            continue
        for chosen in (magnitude > threshold, magnitude <= threshold):
            if chosen.any():
                assert np.allclose(np.abs(found[chosen]), magnitude[chosen].mean(), rtol=1e-5)
    assert np.array_equal(np.signbit(decoded), np.signbit(x))


def test_one_large_element_is_exact_in_int2():
    x = np.zeros(1024, np.float32)
    x[77] = -3.7
    assert np.array_equal(transcode("int2", [x])[1], x)


def test_buffers_are_checked():
    x, message = np.zeros(100, np.float32), aligned(1000)
    codec = core.CODECS["fp16"]
    with pytest.raises(ValueError, match="raw has 400 bytes, needs 404"):
        core.transcode(codec, 101, raw=[x], message=message)
    with pytest.raises(ValueError, match="message has 190 bytes, needs 200"):
        core.transcode(codec, 100, raw=[x], message=message[:190])
    with pytest.raises(ValueError, match="message is not aligned to 64"):
        core.transcode(codec, 100, raw=[x], message=message[2:])
    with pytest.raises(ValueError, match="not aligned to 4"):
        core.transcode(codec, 10, raw=[x.view(np.uint8)[1:]], message=message)
    with pytest.raises(ValueError, match="not contiguous"):
        core.transcode(codec, 50, raw=[x[::2]], message=message)
    with pytest.raises((ValueError, BufferError)):
        core.transcode(codec, 10, raw=[x], message=bytes(64))
    with pytest.raises(ValueError, match="not known"):
        core.encoded_bytes(core.CODECS["topk"], 10)
    with pytest.raises(ValueError, match="not known"):
        core.encoded_bytes(99, 10)
