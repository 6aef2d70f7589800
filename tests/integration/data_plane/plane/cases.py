"""Which operations to run: a sample that covers every pair of dtype and op, and very long vectors."""

import random
from typing import Any

from plane import codecs
from plane.reference import FLOATS, INTEGERS, OPS, SIZE

Case = dict[str, Any]
DTYPES = (*FLOATS, *INTEGERS, "bool")
REDUCING = ("allreduce", "reduce", "reduce_scatter")
MOVING = ("broadcast", "allgather", "gather", "scatter", "alltoall", "ring")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
DIRECT_BYTES = 32 * 1024  # up to here an all-reduce between hosts takes one trip (csrc/core/collective)
EDGE = 64  # bytes that are watched before and behind each result

# Kinds whose large side has n times the elements of the small side.
GIVES_ALL = ("reduce_scatter", "scatter", "alltoall")
GETS_ALL = ("allgather", "gather", "alltoall")


def counts(itemsize, chunk_bytes, hosts):
    """Sizes at which something changes: nothing, one, odd, about a chunk, a chunk for each host, the direct limit."""
    chunk, direct = chunk_bytes // itemsize, DIRECT_BYTES // itemsize
    about = [edge + d for edge in (chunk, hosts * chunk, 2 * hosts * chunk, direct) for d in (-1, 0, 1)]
    return sorted({0, 1, 2, 3, 17, 63, 64, 65, 1023, 1024, 1025, *about, 3 * hosts * chunk + 7})


def case(kind, dtype, op, count, n, draw, seed):
    """One operation with offsets, root and flavour that ``draw`` chooses."""
    size = SIZE[dtype]
    return {
        "kind": kind,
        "dtype": dtype,
        "op": op if kind in REDUCING else "SUM",
        "count": count,
        "root": draw.randrange(n) if kind in ROOTED else -1,
        "in_place": kind not in ("alltoall", "ring") and draw.random() < 0.3,
        # Any multiple of the element size is allowed; most are not those of a cache line.
        "src_at": size * draw.choice([0, 0, 1, 3, 64 // size, 5 + 64 // size]),
        "dst_at": EDGE + size * draw.choice([0, 0, 1, 7, 64 // size]),
        "special": dtype in FLOATS and op != "PRODUCT" and draw.random() < 0.25,
        "seed": seed,
    }


def sampled(n, hosts, chunk_bytes, seed, extra, limit=1 << 20):
    """Every pair of dtype and op at two sizes, every kind at a few, and ``extra`` more: a different choice for each
    ``seed``, always the same for one. Large sides stay below ``limit`` bytes."""
    draw = random.Random(f"{n}/{hosts}/{chunk_bytes}/{seed}")

    def count_for(kind, dtype):
        copies = n if kind in (*GIVES_ALL, *GETS_ALL) else 1
        fitting = [c for c in counts(SIZE[dtype], chunk_bytes, hosts) if c * copies * SIZE[dtype] <= limit]
        return draw.choice(fitting)

    wanted = []
    for dtype in DTYPES:
        wanted += [("allreduce", dtype, op) for op in OPS[dtype]] * 2
        wanted += [(kind, dtype, draw.choice(OPS[dtype])) for kind in ("reduce", "reduce_scatter")]
    for kind in MOVING:
        wanted += [(kind, dtype, "SUM") for dtype in draw.sample(DTYPES, 3)]
    for _ in range(extra):
        dtype = draw.choice(DTYPES)
        wanted.append((draw.choice([*REDUCING, *MOVING]), dtype, draw.choice(OPS[dtype])))
    draw.shuffle(wanted)
    made = [
        case(kind, dtype, op, count_for(kind, dtype), n, draw, number)
        for number, (kind, dtype, op) in enumerate(wanted)
    ]
    return [one for one in made if n > 1 or one["kind"] != "ring"]


def large(n):
    """64 MiB to 1 GiB, odd and even: float32 at every size, the rest at one."""
    draw = random.Random(n)
    for number, (dtype, op, nbytes) in enumerate(
        [
            *[("float32", "SUM", 1 << power) for power in (26, 27, 28, 29, 30)],
            *[("float32", "AVG", (1 << 26) + 4), ("bfloat16", "AVG", (1 << 28) - 2), ("float64", "SUM", (1 << 28) + 8)],
            *[("uint8", "BXOR", (1 << 27) + 1), ("int64", "PRODUCT", (1 << 27) - 8), ("float16", "MAX", 1 << 26)],
        ]
    ):
        made = case("allreduce", dtype, op, nbytes // SIZE[dtype], n, draw, number)
        yield {**made, "in_place": nbytes >= 1 << 30 or made["in_place"], "special": False}


def coded(n, sizes, seed=0):
    """Every codec at every size, with SUM or AVG, in place or not, some with elements that cross as they are."""
    draw = random.Random(seed)
    made = []
    for number, (name, count) in enumerate((name, count) for name in codecs.NAMES for count in sizes):
        one = case("allreduce", "float32", draw.choice(["SUM", "AVG"]), count, n, draw, number)
        exact = draw.choice([0, 0, 1, 77]) if count > 100 else 0
        density = codecs.DENSITY if name == "topk" else 0
        made.append({**one, "special": False, "codec": name, "density": density, "exact": exact})
    return made


def segment_bytes(cases, n):
    """Bytes that a rank needs for each of its two segments."""
    wide = (*GIVES_ALL, *GETS_ALL)
    return 4096 + max(c["count"] * SIZE[c["dtype"]] * (n if c["kind"] in wide else 1) for c in cases)
