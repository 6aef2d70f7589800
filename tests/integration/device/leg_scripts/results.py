"""Results: every kind of operation against numpy, codecs."""

import hashlib

import numpy as np


def values(rank, count, dtype):
    """A rank's contribution: small whole numbers, so that every sum is exact."""
    numbers = (np.arange(count) * 7 + rank * 3) % 5 + 1
    return numbers.astype(dtype)


def numpy_op(op, inputs):
    stack = np.stack(inputs)
    wide = stack.astype(np.float64) if stack.dtype.kind == "f" else stack.astype(np.int64)
    by_name = {"PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum, "BXOR": np.bitwise_xor}
    total = by_name.get(op, np.add).reduce(wide, axis=0)
    if op == "AVG":
        total = total / len(inputs) if stack.dtype.kind == "f" else total // len(inputs)
    return total.astype(stack.dtype)


def check_reductions(test, count, dtype, op):
    inputs = [values(rank, count * test.world, dtype) for rank in range(test.world)]
    mine, want = inputs[test.me].copy(), numpy_op(op, inputs)
    tolerance = 1e-3 if dtype == "float16" else 1e-6
    what = f"{op} of {count} x {dtype}"

    def same(got, wanted, name):
        if op == "AVG":
            assert np.allclose(got.astype(np.float64), wanted.astype(np.float64), rtol=tolerance), (name, what)
        else:
            assert np.array_equal(got, wanted), (name, what, got[:8], wanted[:8])

    out = np.zeros(count * test.world, mine.dtype)
    test.call("allreduce", mine, out, count * test.world, op=op)
    same(out, want, "allreduce")
    place = mine.copy()
    test.call("allreduce", place, place, count * test.world, op=op)
    same(place, want, "allreduce in place")
    root = test.world - 1
    out = np.zeros_like(mine)
    test.call("reduce", mine, out if test.me == root else None, count * test.world, op=op, root=root)
    if test.me == root:
        same(out, want, "reduce")
    part = np.zeros(count, mine.dtype)
    test.call("reduce_scatter", mine, part, count, op=op)
    same(part, want[test.me * count : (test.me + 1) * count], "reduce_scatter")


def check_moves(test, count, dtype):
    n, me = test.world, test.me
    rows = [values(rank, count, dtype) for rank in range(n)]
    whole = [np.concatenate([values(rank * n + j, count, dtype) for j in range(n)]) for rank in range(n)]
    every, one = np.zeros(n * count, dtype), np.zeros(count, dtype)
    root = 1 % n
    test.call("broadcast", rows[root] if me == root else None, one, count, root=root)
    assert np.array_equal(one, rows[root]), "broadcast"
    test.call("allgather", rows[me], every, count)
    assert np.array_equal(every, np.concatenate(rows)), "allgather"
    every[:] = 0
    test.call("gather", rows[me], every if me == root else None, count, root=root)
    assert me != root or np.array_equal(every, np.concatenate(rows)), "gather"
    test.call("scatter", whole[root] if me == root else None, one, count, root=root)
    assert np.array_equal(one, whole[root][me * count : (me + 1) * count]), "scatter"
    test.call("alltoall", whole[me], every, count)
    want = np.concatenate([whole[rank][me * count : (me + 1) * count] for rank in range(n)])
    assert np.array_equal(every, want), "alltoall"
    before, after = (me - 1) % n, (me + 1) % n
    sent = test.submit("send", rows[me], None, count, root=after)
    got = test.submit("recv", None, one, count, root=before)
    test.finish(sent, got)
    assert np.array_equal(one, rows[before]), "send and recv"
    test.call("barrier", None, None, 0, dtype="uint8")


def kinds(test, route, counts):
    """All kinds, dtypes and reductions, against numpy."""
    test.open(route)
    test.fakes.cuda.fake_cuda_watch_this_thread()
    for count in counts:
        for dtype in ("float32", "float64", "float16", "int32", "int64", "uint8"):
            ops = ["SUM", "AVG", "MAX"] if count == counts[0] else ["SUM"]
            for op in ops:
                check_reductions(test, count, dtype, op)
        for op in ("MIN", "PRODUCT", "BXOR"):
            check_reductions(test, count, "int32", op)
        for dtype in ("float32", "float64", "int8"):
            check_moves(test, count, dtype)
    half = np.full(1000, (np.array([test.me + 1], np.float32).view(np.uint32) >> 16)[0], np.uint16)
    test.call("allreduce", half, half, 1000, dtype="bfloat16")
    assert ((half.astype(np.uint32) << 16).view(np.float32) == test.world * (test.world + 1) / 2).all(), "bfloat16"
    found = test.leg.report(0)["route"]
    counters = test.close()
    after = test.fakes.of_nccl()
    return {"route": found, **counters, "nccl": after, "left": test.fakes.left()}


def encoded(test, route, codec, steps, count):
    """All-reduce with a codec and error feedback: what every step gave, as a digest, and how far the sum of the steps
    is from the truth."""
    test.open(route)
    number, density = test.core.CODECS[codec], 6554 if codec == "topk" else 0
    rng = [np.random.default_rng(100 + rank) for rank in range(test.world)]
    digests, got, truth, exact_right = [], np.zeros(count), np.zeros(count), True
    for _ in range(steps):
        inputs = [generator.standard_normal(count).astype(np.float32) for generator in rng]
        mine, mean = inputs[test.me], np.mean(inputs, axis=0, dtype=np.float64)
        more = {"codec": number, "density": density, "residual": 5, "exact": 37, "op": "AVG"}
        test.call("allreduce", mine, mine, count, **more)
        digests.append(hashlib.sha256(mine.tobytes()).hexdigest())
        got += mine
        truth += mean
        exact_right = exact_right and bool(np.allclose(mine[-37:], mean[-37:], rtol=1e-4, atol=1e-6))
    missing = test.leg.capabilities()["why_not"]
    counters = test.close()
    return {
        "digests": digests,
        "error": float(np.abs(got - truth).mean()) / steps,
        "exact": exact_right,
        "route": {name: counters[f"ops_{name}"] for name in ("staged", "flat", "hierarchical")},
        "residual_bytes": counters["residual_bytes"],
        "missing": missing,
        "left": test.fakes.left(),
    }
