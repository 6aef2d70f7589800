"""What ranks do in the tests of the GPU leg. Every function gets a ``Member`` and returns what JSON can hold."""

from __future__ import annotations

import ctypes
import hashlib
import os
import time
from typing import Any

import leg_rank
import numpy as np

NUMPY = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "int8": np.int8,
}


class Member:
    """A rank, its leg, and a stream of the user's. Memory of numpy counts as the device's."""

    def __init__(self, core: Any, device: Any, rank: Any, fakes: Any, me: int, hosts: list[list[int]]) -> None:
        self.core, self.device, self.rank, self.fakes, self.me, self.hosts = core, device, rank, fakes, me, hosts
        self.world = sum(len(there) for there in hosts)
        self.leg: Any = None
        self.stream = fakes.stream()

    def open(self, route: str = "", device: int = 0) -> Any:
        self.leg = self.device.Leg(rank=self.rank, device=device, hosts=self.hosts, me=self.me, route=route)
        return self.leg

    def submit(self, kind: str, src: Any, dst: Any, count: int, stream: int | None = None, **more: Any) -> int:
        dtype = more.pop("dtype", None) or str((src if src is not None else dst).dtype)
        op = self.core.OPS[more.pop("op", "SUM")]
        ticket: int = self.leg.submit(
            comm=more.pop("comm", 0),
            kind=self.core.KINDS[kind],
            dtype=self.core.DTYPES[dtype],
            op=op,
            count=count,
            src=0 if src is None else src.ctypes.data,
            dst=0 if dst is None else dst.ctypes.data,
            stream=self.stream if stream is None else stream,
            **more,
        )
        return ticket

    def finish(self, *tickets: int) -> None:
        """Waits on the stream, then drains it by means of the fake."""
        for ticket in tickets:
            self.leg.wait(ticket, self.stream)
            self.leg.release(ticket)
        self.fakes.drain(self.stream)

    def call(self, kind: str, src: Any, dst: Any, count: int, **more: Any) -> None:
        self.finish(self.submit(kind, src, dst, count, **more))

    def close(self) -> dict[str, int]:
        counters: dict[str, int] = self.leg.counters()
        self.fakes.cuda.fake_cuda_unwatch_this_thread()
        self.leg.close()
        self.leg.close()
        return counters


def values(rank: int, count: int, dtype: str) -> Any:
    """What a rank gives: small whole numbers, so that every sum is exact."""
    numbers = (np.arange(count) * 7 + rank * 3) % 5 + 1
    return numbers.astype(NUMPY[dtype])


def numpy_op(op: str, inputs: list[Any]) -> Any:
    stack = np.stack(inputs)
    wide = stack.astype(np.float64) if stack.dtype.kind == "f" else stack.astype(np.int64)
    if op == "AVG":
        total = wide.sum(axis=0)
        return (total / len(inputs) if stack.dtype.kind == "f" else total // len(inputs)).astype(stack.dtype)
    by_name = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
    by_name |= {"BOR": np.bitwise_or, "BAND": np.bitwise_and, "BXOR": np.bitwise_xor}
    return by_name[op].reduce(wide, axis=0).astype(stack.dtype)


def check_reductions(test: Member, count: int, dtype: str, op: str) -> None:
    inputs = [values(rank, count * test.world, dtype) for rank in range(test.world)]
    mine, want = inputs[test.me].copy(), numpy_op(op, inputs)
    tolerance = 1e-3 if dtype == "float16" else 1e-6
    what = f"{op} of {count} x {dtype}"

    def same(got: Any, wanted: Any, name: str) -> None:
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


def check_moves(test: Member, count: int, dtype: str) -> None:
    n, me = test.world, test.me
    rows = [values(rank, count, dtype) for rank in range(n)]
    whole = [np.concatenate([values(rank * n + j, count, dtype) for j in range(n)]) for rank in range(n)]
    every, one = np.zeros(n * count, NUMPY[dtype]), np.zeros(count, NUMPY[dtype])
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


def kinds(test: Member, route: str, counts: list[int]) -> dict[str, Any]:
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
    found = test.leg.route(0)
    return {"route": found, **test.close(), "left": test.fakes.left()}


def bf16_sum(test: Member, route: str) -> bool:
    """1 + 2 + ... of bfloat16, as bits."""
    test.open(route)
    mine = np.full(1000, (np.array([test.me + 1], np.float32).view(np.uint32) >> 16)[0], np.uint16)
    test.call("allreduce", mine, mine, 1000, dtype="bfloat16")
    total = float((mine.astype(np.uint32) << 16).view(np.float32)[0])
    test.close()
    return bool(total == test.world * (test.world + 1) / 2 and (mine == mine[0]).all())


def encoded(test: Member, route: str, codec: str, steps: int, count: int) -> dict[str, Any]:
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
    counters = test.close()
    return {
        "digests": digests,
        "error": float(np.abs(got - truth).mean()) / steps,
        "exact": exact_right,
        "route": {name: counters[f"ops_{name}"] for name in ("staged", "flat", "hierarchical")},
        "residual_bytes": counters["residual_bytes"],
        "left": test.fakes.left(),
    }


def order(test: Member, route: str) -> dict[str, Any]:
    """An operation sees what the stream wrote before it; the stream sees the result after ``wait``."""
    test.open(route)
    cuda, stream = test.fakes.cuda, ctypes.c_void_p(test.stream)
    count = 10_000
    data, fresh = np.zeros(count, np.float32), np.full(count, test.me + 1, np.float32)
    copy, pointer = np.zeros(count, np.float32), ctypes.c_void_p
    cuda.fake_cuda_watch_this_thread()
    tickets = []
    for _ in range(3):  # each one adds up what the one before gave
        cuda.fake_cuda_copy_slowly(
            stream, pointer(data.ctypes.data), pointer(fresh.ctypes.data), ctypes.c_uint64(count), 50
        )
        ticket = test.submit("allreduce", data, data, count)
        early = test.leg.done(ticket)
        test.leg.wait(ticket, test.stream)
        cuda.fake_cuda_copy_slowly(
            stream, pointer(copy.ctypes.data), pointer(data.ctypes.data), ctypes.c_uint64(count), 1
        )
        cuda.fake_cuda_copy_slowly(
            stream, pointer(fresh.ctypes.data), pointer(copy.ctypes.data), ctypes.c_uint64(count), 1
        )
        tickets.append(ticket)
    test.fakes.drain(test.stream)
    times = [test.leg.times(ticket) for ticket in tickets]
    done = all(test.leg.done(ticket) for ticket in tickets)
    for ticket in tickets:
        test.leg.release(ticket)
    result = float(copy[0]), bool((copy == copy[0]).all())
    test.close()
    return {"result": result, "early": early, "done": done, "times": all(a <= b <= c for a, b, c in times)}


def many(test: Member, route: str, steps: int, buckets: int) -> dict[str, Any]:
    """A training loop: several buckets in flight; after a while nothing new is made."""
    test.open(route)
    test.fakes.cuda.fake_cuda_watch_this_thread()
    data = [np.ones(1000 * (i + 1), np.float32) for i in range(buckets)]
    made = []
    for _ in range(steps):
        tickets = [test.submit("allreduce", bucket, bucket, bucket.size, op="AVG") for bucket in data]
        test.finish(*tickets)
        counters = test.leg.counters()
        made.append((counters["host_waits"], test.fakes.left()["events"]))
    right = all(bool((bucket == 1).all()) for bucket in data)
    return {"right": right, "made": made, **test.close()}


def communicators(test: Member, route: str, rounds: int) -> dict[str, Any]:
    """Communicators that come and go leave nothing behind."""
    test.open(route)
    left = []
    for turn in range(rounds):
        for members in ([0, 1], list(range(test.world))):
            if test.me not in members:
                continue
            comm = 20 + len(members) + (turn % 2)
            test.leg.create_comm(comm, members)
            data = np.full(500, test.me, np.float64)
            test.call("allreduce", data, data, 500, comm=comm)
            assert (data == sum(members)).all()
            test.leg.destroy_comm(comm)
        left.append(test.fakes.left())
    test.close()
    return {"left": left}


def lost(test: Member, route: str, hang: bool) -> dict[str, Any]:
    """Submits an operation that can't end; says how it ended when the test has killed a rank or an engine."""
    test.open(route)
    data = np.ones(1 << 16, np.float32)
    test.call("allreduce", data, data, data.size)
    if hang:
        test.fakes.nccl.fake_nccl_hang(1)
    ready = test.me != test.world - 1
    tickets = [test.submit("allreduce", data, data, data.size) for _ in range(3)] if ready or hang else []
    for ticket in tickets:
        test.leg.wait(ticket, test.stream)
    leg_rank.pause()
    begin = time.monotonic()
    said = ""
    try:
        if tickets:
            test.leg.synchronize(tickets[0])
    except test.device.DeviceError as error:
        said = str(error)
    later = ""
    try:
        test.submit("allreduce", data, data, data.size)
    except test.device.DeviceError as error:
        later = str(error)
    test.fakes.drain(test.stream)  # the user's stream is free
    done = all(test.leg.done(ticket) for ticket in tickets)
    aborts = test.leg.counters()["aborts"]
    test.close()
    took = time.monotonic() - begin
    return {"said": said, "later": later, "took": took, "done": done, "aborts": aborts, "left": test.fakes.left()}


def refused(test: Member) -> list[str]:
    """Wrong calls are refused at once, and the leg lives on."""
    leg = test.open("staged")
    data = np.ones(100, np.float32)
    said = []
    wrong: list[dict[str, Any]] = [
        {"kind": 99},
        {"dtype": 77},
        {"comm": 5},
        {"src": 0},
        {"dst": 0},
        {"src": data.ctypes.data + 1},
        {"codec": 3, "dtype": 1},
        {"codec": 8},
        {"residual": 3},
        {"kind": test.core.KINDS["broadcast"], "root": 9},
    ]
    right = {
        "comm": 0,
        "kind": test.core.KINDS["allreduce"],
        "dtype": 0,
        "count": 100,
        "src": data.ctypes.data,
        "dst": data.ctypes.data,
        "stream": test.stream,
    }
    for change in wrong:
        try:
            leg.submit(**{**right, **change})
            said.append("")
        except test.device.DeviceError as error:
            said.append(str(error))
    test.fakes.cuda.fake_cuda_set_capturing(ctypes.c_void_p(test.stream), 1)
    try:
        leg.submit(**right)
        said.append("")
    except test.device.DeviceError as error:
        said.append(str(error))
    test.fakes.cuda.fake_cuda_set_capturing(ctypes.c_void_p(test.stream), 0)
    test.call("allreduce", data, data, 100)
    assert (data == test.world).all()
    test.close()
    return said


def routes(test: Member, route: str = "") -> dict[str, Any]:
    """Which route is chosen."""
    leg = test.open(route)
    found = leg.route(0), leg.capabilities()["nccl_version"], os.environ.get("NCCL_HOSTID", "")
    data = np.full(1000, test.me, np.float32)
    test.call("allreduce", data, data, 1000)
    assert (data == sum(range(test.world))).all()
    test.close()
    return {"route": found[0], "nccl_version": found[1], "host": found[2]}


def report(test: Member, route: str = "", members: list[int] | None = None) -> dict[str, Any]:
    """What the leg says about the routes of all ranks, or of some, and that an operation works."""
    leg = test.open(route)
    comm, groups = 0, {0: list(range(test.world))}
    if members is not None and test.me in members:
        comm, groups[7] = 7, members
        leg.create_comm(comm, members)
    for number, ranks in groups.items():
        data = np.full(1000, test.me, np.float32)
        test.call("allreduce", data, data, 1000, comm=number)
        assert (data == sum(ranks)).all()
    found: dict[str, Any] = leg.report(comm)
    assert found["route"] == leg.route(comm)
    test.close()
    return found | {"left": test.fakes.left()}


def no_way(test: Member, route: str) -> str:
    """Sends where sends have no way: refused, and the leg lives on."""
    test.open(route)
    data, said = np.ones(100, np.float32), ""
    try:
        test.submit("send", data, None, 100, root=1 - test.me)
    except test.device.DeviceError as error:
        said = str(error)
    test.call("allreduce", data, data, 100)
    assert (data == test.world).all()
    test.close()
    return said


def crossed(test: Member) -> bool:
    """Ranks use two communicators in different orders."""
    test.open("staged")
    data = {comm: np.full(1000, comm, np.float32) for comm in (11, 12)}
    for comm in data:
        test.leg.create_comm(comm, list(range(test.world)))
    for _ in range(3):
        order = sorted(data, reverse=test.me % 2 == 1)
        test.finish(*[test.submit("allreduce", data[comm], data[comm], 1000, comm=comm, op="AVG") for comm in order])
    test.close()
    return all(bool((found == comm).all()) for comm, found in data.items())


def on_another_device(test: Member) -> dict[str, Any]:
    """A thread whose current device is 0, and the default stream of device 1."""
    cuda = test.fakes.cuda
    cuda.fake_cuda_fill.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_float]
    count = 100_000
    data, copy = np.zeros(count, np.float32), np.zeros(count, np.float32)
    cuda.cudaSetDevice(1)
    test.open("staged", device=1)
    cuda.fake_cuda_fill(None, data.ctypes.data, count, test.me + 1)
    cuda.cudaSetDevice(0)
    ticket = test.submit("allreduce", data, data, count, stream=0)
    test.leg.wait(ticket, 0)
    now = ctypes.c_int()
    cuda.cudaGetDevice(ctypes.byref(now))
    cuda.cudaSetDevice(1)
    pointer = ctypes.c_void_p
    cuda.fake_cuda_copy_slowly(None, pointer(copy.ctypes.data), pointer(data.ctypes.data), ctypes.c_uint64(count), 0)
    test.fakes.drain(0)
    test.close()
    return {"result": [float(copy[0]), bool((copy == copy[0]).all())], "device": now.value}


def two_devices(test: Member) -> bool:
    """One rank, two devices, each with a leg."""
    legs = [
        test.device.Leg(rank=test.rank, device=index, hosts=test.hosts, me=test.me, world=False) for index in (0, 1)
    ]
    data = [np.full(1000, index + 1, np.float32) for index in (0, 1)]
    streams = []
    for index, leg in enumerate(legs):
        test.fakes.cuda.cudaSetDevice(index)
        streams.append(test.fakes.stream())
        leg.create_comm(50 + index, list(range(test.world)))
    for _ in range(2):
        for index, test.leg in enumerate(legs):
            ticket = test.submit("allreduce", data[index], data[index], 1000, comm=50 + index, stream=streams[index])
            test.leg.wait(ticket, streams[index])
    for stream in streams:
        test.fakes.drain(stream)
    for leg in legs:
        leg.close()
    return all(bool((data[index] == (index + 1) * test.world**2).all()) for index in (0, 1))


def during_a_capture(test: Member, route: str) -> None:
    """Another thread captures its stream: nothing that the leg does may spoil that."""
    test.open(route)
    elsewhere = ctypes.c_void_p(test.fakes.stream())
    test.fakes.cuda.fake_cuda_set_capturing(elsewhere, 1)
    for count in (100, 1_000_000):  # larger memory must be made
        data = np.full(count, test.me, np.float32)
        ticket = test.submit("allreduce", data, data, count)
        test.leg.wait(ticket, test.stream)
        assert test.leg.synchronize(ticket)
        test.leg.times(ticket)
        assert test.leg.done(ticket)
        test.leg.release(ticket)
        assert (data == sum(range(test.world))).all()
    test.leg.create_comm(7, list(range(test.world)))
    test.leg.destroy_comm(7)
    test.fakes.cuda.fake_cuda_set_capturing(elsewhere, 0)
    test.close()


def broken_device(test: Member, route: str) -> dict[str, Any]:
    """An error of the device is noticed without a call, and everything ends."""
    test.open(route)
    data = np.ones(1000, np.float32)
    test.call("allreduce", data, data, 1000)
    test.fakes.cuda.fake_cuda_break(700)
    begin = time.monotonic()
    while not test.leg.error() and time.monotonic() < begin + 60:
        time.sleep(0.01)
    said = test.leg.error()
    test.close()
    return {"said": said}


def forked(test: Member, route: str) -> dict[str, Any]:
    """A child is refused, and ends by itself; the parent goes on."""
    test.open(route)
    data = np.ones(1000, np.float32)
    test.call("allreduce", data, data, 1000)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            test.submit("allreduce", data, data, 1000)
        except test.device.DeviceError as error:
            os.write(writable, str(error).encode())
        test.leg.close()
        test.leg = None  # and what the interpreter does at its end
        os._exit(0)
    os.close(writable)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(readable) as pipe:
        said = pipe.read()
    test.call("allreduce", data, data, 1000)
    test.close()
    return {"said": said, "status": status}


def several_hang(test: Member) -> dict[str, Any]:
    """Several communicators of NCCL hang at once: aborting one waits for the others' kernels."""
    test.open("flat")
    comms = [0, 21, 22]
    for comm in comms[1:]:
        test.leg.create_comm(comm, list(range(test.world)))
    data = [np.ones(1000, np.float32) for _ in comms]
    for comm, mine in zip(comms, data, strict=True):
        test.call("allreduce", mine, mine, 1000, comm=comm)
    test.fakes.nccl.fake_nccl_hang(1)
    for comm, mine in zip(comms, data, strict=True):
        test.leg.wait(test.submit("allreduce", mine, mine, 1000, comm=comm), test.stream)
    leg_rank.pause()
    test.fakes.drain(test.stream)
    aborts = test.leg.counters()["aborts"]
    test.close()
    return {"aborts": aborts, "left": test.fakes.left()}


def closed_while_pending(test: Member, route: str) -> dict[str, Any]:
    """``close`` ends what will never be done."""
    test.open(route)
    data = np.ones(1000, np.float32)
    test.call("allreduce", data, data, 1000)
    if test.me == 0:
        ticket = test.submit("allreduce", data, data, 1000)
        test.leg.wait(ticket, test.stream)
    test.close()
    test.fakes.drain(test.stream)
    return {"left": test.fakes.left()}
