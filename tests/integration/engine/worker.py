"""A rank for the engine's tests: a process that joins an engine and runs one of the scripts below.

Run as ``python worker.py '<json>'`` with {"core" (path), "socket", "token" (hex), "rank", "world", "script", "args"}.
It prints one JSON line, its result. A line on its standard input lets a script go on where it asks (``pause``).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
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


# ---- every kind of operation against a reference


def blocks(kind: str, me: int, root: int, n: int) -> tuple[int, int]:
    """How many times ``count`` elements rank ``me`` gives and gets."""
    at_root = me == root
    return {
        "allreduce": (1, 1), "reduce": (1, int(at_root)), "broadcast": (int(at_root), 1), "allgather": (1, n),
        "reduce_scatter": (n, 1), "gather": (1, n * at_root), "scatter": (n * at_root, 1), "alltoall": (n, n),
    }[kind]  # fmt: skip


def expected(kind: str, op: str, dtype: str, count: int, root: int, me: int, ranks: list[int], seed: int) -> np.ndarray:
    """What rank number ``me`` of ``ranks`` must get, as float64 or int64."""
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


# ---- what crosses between hosts encoded, see csrc/collective/compressed.cpp

DENSITY = 655  # of 65536, for topk


def density_of(codec: str) -> int:
    return DENSITY if codec == "topk" else 0


def aligned(nbytes: int) -> np.ndarray:
    """Memory for a message: aligned to 64 bytes."""
    room = np.empty(nbytes + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:nbytes]


def through(codec: str, values: np.ndarray) -> np.ndarray:
    """What a message made of ``values`` says."""
    said = np.empty_like(values)
    message = aligned(core.encoded_bytes(CODECS[codec], len(values), density_of(codec)))
    core.transcode(CODECS[codec], len(values), raw=[values], message=message, decoded=[said], density=density_of(codec))
    return said


class Reference:
    """The plain mathematics of a compressed all-reduce: one block, one host after the other."""

    def __init__(self, codec: str, hosts: list[list[int]], count: int, feedback: bool) -> None:
        self.codec, self.hosts, self.count = codec, hosts, count
        self.residuals = [np.zeros(count, np.float32) for _ in hosts] if feedback else None

    def say(self, host: int, part: slice, values: np.ndarray) -> np.ndarray:
        """Encodes with what this host still owes, and notes what it owes now."""
        if self.residuals is None:
            return through(self.codec, values)
        owed = values + self.residuals[host][part]
        said = through(self.codec, owed)
        self.residuals[host][part] = owed - said
        return said

    def run(self, inputs: dict[int, np.ndarray], exact: int) -> np.ndarray:
        """The result for the sum of the ranks' inputs, of which the last ``exact`` elements cross as they are."""
        sums = [functools.reduce(np.add, (inputs[rank] for rank in ranks)) for ranks in self.hosts]
        result = functools.reduce(np.add, sums)
        unit = 16384 if self.codec == "topk" else 1024
        units, begin = -(-(self.count - exact) // unit), 0
        for owner in range(len(self.hosts)):
            mine = units // len(self.hosts) + (owner < units % len(self.hosts))
            part = slice(begin, min(begin + mine * unit, self.count - exact))
            begin = part.stop
            if part.start == part.stop:
                continue
            total = sums[owner][part]
            for host in range(len(self.hosts)):
                if host != owner:
                    total = total + self.say(host, part, sums[host][part])
            result[part] = self.say(owner, part, total)
        return result


def compressed(rank: Rank, hosts: list[list[int]], counts: list[int], steps: int) -> dict[str, Any]:
    """Several all-reduces with every codec; all results must have the reference's bits."""
    wrong, found, number = [], hashlib.sha256(), 0
    for codec, count, feedback in itertools.product(list(CODECS)[1:], counts, (False, True)):
        number += 1
        exact = min(count, 3) if feedback else 0
        reference = Reference(codec, hosts, count, feedback)
        for step in range(steps):
            inputs = {
                r: np.random.default_rng([step, number, r]).standard_normal(count).astype(np.float32)
                for r in range(rank.world)
            }
            in_place = step % 2 == 1
            rank.view(rank.src, "float32", count)[:] = inputs[rank.rank]
            rank.run(
                "allreduce", count=count, same=in_place, codec=CODECS[codec], density=density_of(codec),
                residual=number if feedback else 0, exact=exact,
            )  # fmt: skip
            got = rank.view(rank.src if in_place else rank.dst, "float32", count)
            found.update(got.tobytes())
            if got.tobytes() != reference.run(inputs, exact).tobytes():
                wrong.append(f"{codec}, {count} elements, feedback {feedback}, step {step}")
    return {"wrong": wrong[:5], "digest": found.hexdigest(), "residual_bytes": rank.native.counters()["residual_bytes"]}


def traffic(rank: Rank, count: int) -> dict[str, Any]:
    """Bytes that this host sent for one all-reduce of ``count`` elements, for each codec."""
    sent = {}
    for codec in CODECS:
        rank.run("barrier")
        before = rank.native.counters()["bytes_sent"]
        rank.run("allreduce", count=count, codec=CODECS[codec], density=density_of(codec))
        sent[codec] = rank.native.counters()["bytes_sent"] - before
    rank.run("barrier")
    return {"sent": sent}


def residuals(rank: Rank) -> dict[str, Any]:
    """Residuals of a communicator go with it."""
    rank.native.create_comm(1, list(range(rank.world)))
    rank.run("allreduce", comm=1, count=5000, codec=CODECS["onebit"], residual=7)
    held = rank.native.counters()["residual_bytes"]
    rank.run("barrier")
    rank.native.destroy_comm(1)
    say(held=held)
    pause()
    return {"held": rank.native.counters()["residual_bytes"]}


# ---- faults


def call(rank: Rank, calls: list[list[Any]]) -> dict[str, Any]:
    """Runs the calls that ``calls`` gives this rank: [kind, dtype, keyword arguments]."""
    for kind, dtype, more in calls[rank.rank]:
        rank.run(kind, dtype, **more)
    return {}


def endless(rank: Rank, count: int) -> dict[str, Any]:
    """All-reduces until something ends it."""
    say(ready=True)
    while True:
        rank.run("allreduce", count=count)


def hang(rank: Rank, skip: int) -> dict[str, Any]:
    """Everybody but rank ``skip`` waits in an all-reduce; that one waits for a line."""
    say(ready=True)
    if rank.rank == skip:
        pause()
    rank.run("allreduce", count=100, label="bucket 3")
    return {}


def leave(rank: Rank, who: int, send: bool) -> dict[str, Any]:
    """Rank ``who`` leaves in good order while the others still want something of it."""
    rank.run("barrier")
    if rank.rank == who:
        return {}
    if send and rank.rank != 0:
        pause()
        return {}
    rank.run("recv" if send else "allreduce", count=10, root=who if send else -1)
    return {}


def early(rank: Rank, count: int) -> dict[str, Any]:
    """Rank 0 sends all that it has to give and destroys its communicators; rank 1 asks for it when told to."""
    for comm in (5, 6):
        rank.native.create_comm(comm, [0, 1])
    rank.run("barrier", comm=5)
    values = rank.view(rank.src, "float32", count)
    values[:] = np.arange(count) % 1000
    if rank.rank == 1:
        say(ready=True)
        pause()
    rank.run("reduce", comm=5, count=count, root=1)
    for comm in (5, 6):
        rank.native.destroy_comm(comm)
        if rank.rank == 0:
            say(destroyed=comm)
            pause()
    right = rank.rank == 0 or bool((rank.view(rank.dst, "float32", count) == 2 * values).all())
    rank.run("barrier")
    return {"right": right}


def interrupted(rank: Rank) -> dict[str, Any]:
    # What a shell starts in the background inherits that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    say(ready=True)
    try:
        rank.run("allreduce", count=10)
    except KeyboardInterrupt:
        return {"interrupted": True}
    return {"interrupted": False}


def segments(rank: Rank) -> dict[str, Any]:
    """Memory given back is counted, views outlive it, a freed segment can't be used."""
    extra = rank.native.alloc(5000)
    before = rank.native.counters()["segment_bytes"]
    view = memoryview(extra)
    assert extra.nbytes >= 5000 and extra.nbytes % 4096 == 0 and extra.address % 4096 == 0 and len(view) == extra.nbytes
    view[4999] = 7
    rank.native.free(extra.id)
    after = rank.native.counters()["segment_bytes"]
    identity = extra.id
    del extra
    assert view[4999] == 7
    try:
        rank.run("allreduce", count=4, at=(identity, 0))
    except core.CoreError as error:
        return {"freed": before - after, "error": str(error)}
    return {}


def refused(rank: Rank, task: dict[str, Any]) -> dict[str, Any]:
    """A second hello for this rank, and one with a wrong token."""
    errors = []
    for token in (task["token"], "00" * 32):
        try:
            core.Rank(data_socket=task["socket"], token=bytes.fromhex(token), rank=rank.rank)
        except core.CoreError as error:
            errors.append(str(error))
    rank.run("barrier")
    return {"errors": errors}


def forked(rank: Rank) -> dict[str, Any]:
    """A child that still holds the socket (as a loader of data does) must not hide its parent's death."""
    child = os.fork()
    if child == 0:
        try:
            rank.run("barrier")
        except core.CoreError as error:
            say(child=str(error))
        rank.native.close()  # not a goodbye of the parent
        time.sleep(1.5)
        os._exit(0)
    pause()
    return {}


def many(rank: Rank, count: int) -> dict[str, Any]:
    """Many operations in flight, waited for in another order, from two threads."""
    tickets = [rank.start("allreduce", count=1) for _ in range(count)]
    rest = tickets[::2]
    helper = threading.Thread(target=lambda: [rank.native.wait(t, 30.0) for t in tickets[1::2]])
    helper.start()
    for ticket in reversed(rest):
        assert rank.native.wait(ticket, 30.0) is not None and not errors_of(rank, ticket)
    helper.join()
    timed_out = True
    if rank.rank == 0:
        late = rank.start("recv", count=1, root=1)
        timed_out = rank.native.wait(late, 0.05) is None
        rank.run("barrier")
        rank.native.wait(late, 30.0)
    else:
        rank.run("barrier")
        rank.run("send", count=1, root=0)
    return {"timed_out": timed_out}


def errors_of(rank: Rank, ticket: int) -> bool:
    """True if a ticket that was waited for can be waited for again."""
    try:
        rank.native.wait(ticket, 0.0)
    except core.CoreError:
        return False
    return True


SCRIPTS: dict[str, Callable[..., dict[str, Any]]] = {
    script.__name__: script
    for script in (
        verify,
        digest,
        compressed,
        traffic,
        residuals,
        call,
        endless,
        hang,
        leave,
        early,
        interrupted,
        segments,
        refused,
        forked,
        many,
    )
}


def main() -> None:
    task = json.loads(sys.argv[1])
    arguments = {"task": task} if task["script"] == "refused" else task["args"]
    try:
        rank = Rank(task)
        result = SCRIPTS[task["script"]](rank, **arguments)
    except core.CoreError as error:
        say(error=str(error), at=time.monotonic())
        os._exit(3)
    say(**result)
    rank.native.close()


if __name__ == "__main__":
    main()
