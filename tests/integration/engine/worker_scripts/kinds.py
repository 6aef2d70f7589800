"""Every kind of operation against a reference."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from worker_scripts.rank import SIZE, Rank, decode, encode, numbers, reduced


def blocks(kind: str, me: int, root: int, n: int) -> tuple[int, int]:
    """How many times ``count`` elements rank ``me`` gives and gets."""
    at_root = me == root
    return {
        "allreduce": (1, 1), "reduce": (1, int(at_root)), "broadcast": (int(at_root), 1), "allgather": (1, n),
        "reduce_scatter": (n, 1), "gather": (1, n * at_root), "scatter": (n * at_root, 1), "alltoall": (n, n),
    }[kind]  # fmt: skip


def expected(kind: str, op: str, dtype: str, count: int, root: int, me: int, ranks: list[int], seed: int) -> np.ndarray:
    """The result that rank number ``me`` of ``ranks`` must get, as float64 or int64."""
    n = len(ranks)
    inputs = [numbers(rank, count * blocks(kind, i, root, n)[0], dtype, seed) for i, rank in enumerate(ranks)]
    mine = slice(me * count, (me + 1) * count)
    if kind in ("allreduce", "reduce"):
        return reduced(inputs, op, dtype)
    if kind == "reduce_scatter":
        return reduced([part[mine] for part in inputs], op, dtype)
    if kind in ("allgather", "gather"):
        return decode(np.concatenate(inputs), dtype)
    if kind == "alltoall":
        return decode(np.concatenate([part[mine] for part in inputs]), dtype)
    return decode(inputs[root] if kind == "broadcast" else inputs[root][mine], dtype)


def check(rank: Rank, ranks: list[int], comm: int, case: dict[str, Any], seed: int) -> str:
    """Runs one case; says what is wrong, or nothing."""
    kind, op, dtype, count, root = (case[key] for key in ("kind", "op", "dtype", "count", "root"))
    me, n = ranks.index(rank.rank), len(ranks)
    gives, gets = blocks(kind, me, root, n)
    source = numbers(rank.rank, count * gives, dtype, seed)
    target = rank.src if case["in_place"] else rank.dst
    at, into = 0, 0  # offsets in elements
    if case["in_place"]:  # the small side lies at its own block of the large one
        at = me * count if kind in ("allgather", "gather") and gets > 1 else 0
        into = me * count if kind in ("reduce_scatter", "scatter") and gives > 1 else 0
    rank.view(rank.src, dtype, len(source), at * SIZE[dtype])[:] = source
    if not case["in_place"]:
        rank.view(rank.dst, "uint8", count * gets * SIZE[dtype] + 1)[:] = 0xA5
    rank.run(
        kind, dtype, comm=comm, op=op, count=count, root=root, src=at * SIZE[dtype],
        at=(target.id, into * SIZE[dtype]), shape=(count,), label=f"case {seed}",
    )  # fmt: skip
    got = decode(rank.view(target, dtype, count * gets, into * SIZE[dtype]), dtype)
    if gets > 0:
        want = expected(kind, op, dtype, count, root, me, ranks, seed)
        exact = op != "AVG" or not dtype.startswith(("float", "bfloat"))
        tolerance = {"bfloat16": 1e-2, "float16": 1e-3}.get(dtype, 1e-6)
        right = np.array_equal(got, want) if exact else np.allclose(got, want, rtol=tolerance)
        if not right:
            return f"{case}: rank {rank.rank} got {got[:8]}, wants {want[:8]}"
    if not case["in_place"]:
        if rank.view(rank.dst, "uint8", 1, count * gets * SIZE[dtype])[0] != 0xA5:
            return f"{case}: rank {rank.rank}: a byte behind the result was written"
        if not np.array_equal(rank.view(rank.src, dtype, len(source)), source):
            return f"{case}: rank {rank.rank}: the source was changed"
    return ""


def cases(n: int, counts: list[int]) -> Iterator[dict[str, Any]]:
    floats, integers = ["float32", "float64", "float16", "bfloat16"], ["int32", "int64", "uint8"]
    base = {"op": "SUM", "dtype": "float32", "root": -1, "in_place": False}
    for dtype in [*floats, *integers]:  # products of 6 numbers below 3 fit uint8
        for op in ["SUM", "PRODUCT", "MIN", "MAX", "AVG", *(["BOR", "BAND", "BXOR"] if dtype in integers else [])]:
            yield {**base, "kind": "allreduce", "dtype": dtype, "op": op, "count": 57, "in_place": op == "SUM"}
            yield {**base, "kind": "reduce_scatter", "dtype": dtype, "op": op, "count": 19}
            yield {**base, "kind": "reduce", "dtype": dtype, "op": op, "count": 23, "root": n - 1}
    for dtype in ["bool", "int8", "int16", "bfloat16"]:
        yield {**base, "kind": "allgather", "dtype": dtype, "count": 7}
        yield {**base, "kind": "alltoall", "dtype": dtype, "count": 5}
    for count in counts:
        for in_place in (False, True):
            for kind in ("allreduce", "allgather", "reduce_scatter"):
                yield {**base, "kind": kind, "count": count, "in_place": in_place}
            for kind in ("reduce", "broadcast", "gather", "scatter"):
                for root in sorted({0, n - 1}):
                    yield {**base, "kind": kind, "count": count, "root": root, "in_place": in_place}
        yield {**base, "kind": "alltoall", "count": count}


def verify(rank: Rank, counts: list[int]) -> dict[str, Any]:
    """All cases in the world, some in a communicator of the odd or even ranks, sends round a ring."""
    world = list(range(rank.world))
    wrong = [check(rank, world, 0, case, i) for i, case in enumerate(cases(rank.world, counts))]
    rank.run("barrier")
    if rank.world >= 2:
        part = [r for r in world if r % 2 == rank.rank % 2]
        comm = 1 + rank.rank % 2
        rank.native.create_comm(comm, part)
        wrong += [check(rank, part, comm, case, i) for i, case in enumerate(cases(len(part), [1000])) if i % 7 == 0]
        rank.native.destroy_comm(comm)
        wrong += [ring(rank, count, dtype) for count in counts for dtype in ("float32", "uint8")]
    return {"wrong": [text for text in wrong if text][:5], "cases": len(wrong), "stats": rank.native.counters()}


def ring(rank: Rank, count: int, dtype: str) -> str:
    """Every rank sends to the next one and receives from the one before, both at once."""
    after, before = (rank.rank + 1) % rank.world, (rank.rank - 1) % rank.world
    rank.view(rank.src, dtype, count)[:] = numbers(rank.rank, count, dtype, count)
    tickets = [rank.start("send", dtype, count=count, root=after), rank.start("recv", dtype, count=count, root=before)]
    for ticket in tickets:
        rank.native.wait(ticket, 60.0)
    right = np.array_equal(rank.view(rank.dst, dtype, count), numbers(before, count, dtype, count))
    return "" if right else f"rank {rank.rank}: a message of {count} {dtype} arrived changed"


def digest(rank: Rank, count: int) -> dict[str, Any]:
    """All-reduces of random numbers: the digest of the results must not differ between ranks, nor between runs."""
    found = hashlib.sha256()
    for dtype, op in (("float32", "SUM"), ("float16", "AVG"), ("bfloat16", "SUM"), ("float64", "AVG")):
        generator = np.random.default_rng(rank.rank)
        rank.view(rank.src, dtype, count)[:] = encode(generator.standard_normal(count), dtype)
        rank.run("allreduce", dtype, op=op, count=count)
        found.update(rank.view(rank.dst, dtype, count).tobytes())
    return {"digest": found.hexdigest()}
