"""Ranks that are lost, devices and NCCL that fail, forks, the end."""

import os
import threading
import time

import numpy as np

from leg_scripts.member import pause


def lost(test, route, hang):
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
    pause()
    said = test.words_of(lambda: test.await_end(tickets[0])) if tickets else ""
    later = test.words_of(lambda: test.submit("allreduce", data, data, data.size))
    test.fakes.drain(test.stream)  # the user's stream is free
    done = all(test.leg.done(ticket) for ticket in tickets)
    test.close()
    aborts = test.leg.counters()["aborts"]
    return {"said": said, "later": later, "done": done, "aborts": aborts, "left": test.fakes.left()}


def ended_in_a_call(test, route):
    """A thread is inside NCCL, which connects with a rank that does not come, when the test ends the job."""
    test.open(route)
    data = np.ones(1000, np.float32)
    said = []

    call = lambda: said.append(test.words_of(lambda: test.submit("allreduce", data, data, data.size)))  # noqa: E731
    caller = threading.Thread(target=call)
    what = ""
    if test.me != test.world - 1:
        caller.start()
        while not what:
            what = test.leg.waiting()[1]
            time.sleep(0.001)
    pause()
    if what:
        caller.join()
    test.close()
    aborts = test.leg.counters()["aborts"]
    return {"said": "".join(said), "what": what, "aborts": aborts, "left": test.fakes.left()}


def broken_device(test, route):
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


def forked(test, route):
    """A child is refused, and ends by itself; the parent goes on."""
    test.open(route)
    data = np.ones(1000, np.float32)
    test.call("allreduce", data, data, 1000)
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writable, test.words_of(lambda: test.submit("allreduce", data, data, 1000)).encode())
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


def device_that_stops(test):
    """The device of rank 0 stands still while a result is on its way to it."""
    test.open("staged")
    data = np.ones(1000, np.float32)
    test.call("allreduce", data, data, 1000)
    if test.me == 1:
        pause()
    ticket = test.submit("allreduce", data, data, 1000)
    if test.me == 1:
        test.finish(ticket)
        pause()
        test.close()
        return {}
    while test.leg.times(ticket)[1] == 0:
        time.sleep(0.01)
    test.fakes.cuda.fake_cuda_stall(0, 1)
    pause()
    begin = time.monotonic()
    test.leg.close()
    return {"took": time.monotonic() - begin}


def waiting(test, route):
    """The leg's report on an operation for which another rank does not come."""
    test.open(route)
    data = np.ones(1000, np.float32)
    test.call("allreduce", data, data, 1000)
    if test.me == test.world - 1:
        pause()
    ticket = test.submit("allreduce", data, data, 1000)
    deadline = time.monotonic() + 60
    while test.me == 0 and test.leg.times(ticket)[1] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    unasked = test.leg.waiting()[0]
    test.leg.wait(ticket, test.stream)
    seconds, what = 0.0, ""
    while test.me == 0 and seconds < 0.05 and time.monotonic() < deadline:
        time.sleep(0.01)
        seconds, what = test.leg.waiting()
    if test.me == 0:
        pause()
    test.finish(ticket)
    test.await_end(test.submit("allreduce", data, data, 1000))
    while test.leg.waiting()[0] > 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    over = test.leg.waiting()[0]
    test.close()
    return {"unasked": unasked, "seconds": seconds, "what": what, "over": over}
