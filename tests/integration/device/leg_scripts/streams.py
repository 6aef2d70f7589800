"""Order of streams, devices, captures, what operations in flight make."""

import ctypes

import numpy as np


def order(test, route):
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


def many(test, route, steps, buckets):
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


def crossed(test):
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


def on_another_device(test):
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


def two_devices(test):
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


def during_a_capture(test, route):
    """Another thread captures its stream: nothing that the leg does may spoil that."""
    test.open(route)
    elsewhere = ctypes.c_void_p(test.fakes.stream())
    test.fakes.cuda.fake_cuda_set_capturing(elsewhere, 1)
    for count in (100, 1_000_000):  # larger memory must be made
        data = np.full(count, test.me, np.float32)
        ticket = test.submit("allreduce", data, data, count)
        test.leg.wait(ticket, test.stream)
        test.await_end(ticket)
        test.leg.times(ticket)
        assert test.leg.done(ticket)
        test.leg.release(ticket)
        assert (data == sum(range(test.world))).all()
    test.leg.create_comm(7, list(range(test.world)))
    test.leg.destroy_comm(7)
    test.fakes.cuda.fake_cuda_set_capturing(elsewhere, 0)
    test.close()
