"""Routes, communicators, calls that are refused."""

import ctypes
import time

import numpy as np


def communicators(test, route, rounds):
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
    deadline = time.monotonic() + 20
    while test.fakes.left()["threads"] > left[0]["threads"] and time.monotonic() < deadline:
        time.sleep(0.01)  # threads end a moment later
    threads = test.fakes.left()["threads"]
    test.close()
    return {"left": left, "threads": threads}


def report(test, route="", members=None):
    """Returns the leg's report on the routes of all ranks, or of some, and checks that an operation works."""
    before = test.fakes.of_nccl()[1]
    leg = test.open(route)
    comm, groups = 0, {0: list(range(test.world))}
    if members is not None and test.me in members:
        comm, groups[7] = 7, members
        leg.create_comm(comm, members)
    for number, ranks in groups.items():
        data = np.full(1000, test.me, np.float32)
        test.call("allreduce", data, data, 1000, comm=number)
        assert (data == sum(ranks)).all()
    found = leg.report(comm)
    assert found["route"] == leg.report(comm)["route"]
    test.close()
    return found | {"blocking": test.fakes.of_nccl()[1] - before, "left": test.fakes.left()}


def no_way(test, route):
    """Sends where sends have no way: refused, and the leg lives on."""
    test.open(route)
    data = np.ones(100, np.float32)
    said = test.words_of(lambda: test.submit("send", data, None, 100, root=1 - test.me))
    test.call("allreduce", data, data, 100)
    assert (data == test.world).all()
    test.close()
    return said


def refused(test):
    """Wrong calls are refused at once, and the leg lives on."""
    leg = test.open("staged")
    data = np.ones(100, np.float32)
    place, kinds = data.ctypes.data, test.core.KINDS
    right = {"comm": 0, "kind": kinds["allreduce"], "dtype": 0, "count": 100, "stream": test.stream}
    wrong = [
        *({"kind": 99}, {"dtype": 77}, {"comm": 5}, {"src": 0}, {"dst": 0}, {"src": place + 1}),
        *({"codec": 3, "dtype": 1}, {"codec": 8}, {"residual": 3}, {"kind": kinds["broadcast"], "root": 9}),
    ]

    def said_of(**change):
        return test.words_of(lambda: leg.submit(**{**right, "src": place, "dst": place, **change}))

    said = [said_of(**change) for change in wrong]
    test.fakes.cuda.fake_cuda_set_capturing(ctypes.c_void_p(test.stream), 1)
    said.append(said_of())
    test.fakes.cuda.fake_cuda_set_capturing(ctypes.c_void_p(test.stream), 0)
    test.call("allreduce", data, data, 100)
    assert (data == test.world).all()
    test.close()
    return said


def made_while_another_waits(test):
    """Routes of a communicator are measured while a stream waits for another rank, which makes that communicator
    first: nothing may wait for the whole device."""
    test.open()
    data = np.full(1000, test.me, np.float32)
    sent = test.submit("send", data, None, 1000, root=1) if test.me == 0 else None
    test.leg.create_comm(30, [0, 1])
    test.finish(test.submit("recv", None, data, 1000, root=0) if sent is None else sent)
    test.leg.destroy_comm(30)
    test.close()
    return bool((data == 0).all())
