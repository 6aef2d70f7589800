"""One case of the section ``driver``, in a process of its own: it may hang, or leave the card's context broken.

As in the GPU leg a stream waits (cuStreamWaitValue32) on a word in a memfd's memory that another process would set.
Prints a JSON line.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MARK = "RESULT "
MIB = 1 << 20
HUNG_S = 9.0
BLOCKED_S = 0.8
INSIDE_S = 0.5
"""So long the main thread has been in its call when another thread makes its own."""
TO_CARD, FROM_CARD = 1, 2
NOT_READY = 600
NON_BLOCKING = 1
NO_TIMING, BLOCKING = 2, 1
PORTABLE, MAPPED = 1, 2
SEALS = 1 | 2 | 4  # F_SEAL_SEAL, _SHRINK, _GROW: those of the daemon's memory
HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def pointer(address: int) -> ctypes.c_void_p:
    """An address as a parameter."""
    return ctypes.c_void_p(address)


def library(name: str) -> ctypes.CDLL:
    """The one that torch has loaded."""
    paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if f"/{name}.so." in line}
    return ctypes.CDLL(min(paths, default=f"{name}.so"))


class Card:
    """Card 0 by torch and by the C interfaces; memory as the daemon shares it; a stream that waits in it."""

    def __init__(self) -> None:
        self.data = torch.ones(MIB, device="cuda")
        self.data * 2  # this and the next kernel are loaded then
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        self.cuda, self.driver = library("libcudart"), library("libcuda")
        descriptor = os.memfd_create("driver", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 2 * MIB)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.memory = mmap.mmap(descriptor, 2 * MIB)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.call("cudaHostRegister", pointer(self.base), ctypes.c_size_t(2 * MIB), PORTABLE | MAPPED)
        self.on_device = ctypes.c_void_p()
        self.call("cudaHostGetDevicePointer", ctypes.byref(self.on_device), pointer(self.base), 0)
        self.word = ctypes.c_uint32.from_address(self.base)
        least, greatest = ctypes.c_int(), ctypes.c_int()
        self.call("cudaDeviceGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self.priorities = (least.value, greatest.value)
        self.waiting, self.other = self.stream(2), self.stream(2)
        self.done = self.event()  # long over: what is asked of it has an answer at once
        self.call("cudaEventRecord", self.done, self.other)
        torch.cuda.synchronize()

    def call(self, name: str, *arguments: Any) -> None:
        """A function of the runtime. Raises RuntimeError."""
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")

    def stream(self, below: int) -> ctypes.c_void_p:
        """A stream of the priority ``below`` the greatest: the leg has one for each kind of traffic."""
        made = ctypes.c_void_p()
        self.call("cudaStreamCreateWithPriority", ctypes.byref(made), NON_BLOCKING, self.priorities[1] + below)
        return made

    def event(self) -> ctypes.c_void_p:
        """As the leg makes them."""
        made = ctypes.c_void_p()
        self.call("cudaEventCreateWithFlags", ctypes.byref(made), NO_TIMING | BLOCKING)
        return made

    def wait(self, stream: ctypes.c_void_p) -> None:
        """The stream waits until the word is set."""
        address = ctypes.c_ulonglong(self.on_device.value or 0)
        code = self.driver.cuStreamWaitValue32_v2(stream, address, ctypes.c_uint32(1), 0)
        if code:
            raise RuntimeError(f"cuStreamWaitValue32: CUDA error {code}")

    def copy(self, kind: int, offset: int, stream: ctypes.c_void_p | None, nbytes: int = MIB // 2) -> None:
        """Between the data and the shared memory."""
        here, there = pointer(self.base + offset), pointer(self.data.data_ptr())
        to, source = (here, there) if kind == FROM_CARD else (there, here)
        self.call("cudaMemcpyAsync", to, source, ctypes.c_size_t(nbytes), kind, stream)


def tell(**found: Any) -> None:
    """Prints what was found and ends the process, whatever its threads and the card do."""
    print(MARK + json.dumps(found), flush=True)
    os._exit(0)


def watched(case: Callable[[], None], found: dict[str, Any]) -> None:
    """If the case hangs what it has found until then is told. An error ends it at once: at a usual end the driver would
    wait for the streams."""

    def watch() -> None:
        time.sleep(HUNG_S)
        tell(**found, hung=True)

    threading.Thread(target=watch, daemon=True).start()
    try:
        case()
    except Exception as error:
        tell(ended=f"{type(error).__name__}: {error}", **found)
    tell(**found, hung=False)


def memory(card: Card, found: dict[str, Any]) -> None:
    """A stream waits on a word in registered memory of a sealed memfd, and goes on when it is set."""
    card.wait(card.waiting)
    time.sleep(0.1)
    found["waits"] = card.cuda.cudaStreamQuery(card.waiting) == NOT_READY
    card.word.value = 1
    card.call("cudaStreamSynchronize", card.waiting)
    found["goes_on"] = True


def fault(card: Card, found: dict[str, Any]) -> None:
    """The answer of events after an assertion of a kernel, an error that stays: the leg's watcher learns of it so."""
    never = card.event()
    try:
        torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")]
    except RuntimeError as error:
        found["torch"] = str(error)[:100]
    until = time.monotonic() + 3
    while (code := card.cuda.cudaEventQuery(card.done)) in (0, NOT_READY) and time.monotonic() < until:
        time.sleep(0.01)
    found["recorded"] = code
    found["never_recorded"] = card.cuda.cudaEventQuery(never)
    found["stream"] = card.cuda.cudaStreamQuery(card.other)


def beside(card: Card, found: dict[str, Any], work: Callable[[], Callable[[], bool]], waiting: int = 1) -> None:
    """Whether ``work``, which returns how to ask if it is over, goes on while streams wait with a copy behind."""
    for stream in [card.waiting, *(card.stream(2) for _ in range(waiting - 1))]:
        card.wait(stream)
        card.copy(TO_CARD, 4096, stream)
    over = work()
    until = time.monotonic() + 3 * BLOCKED_S
    while not over() and time.monotonic() < until:
        time.sleep(0.001)
    found["goes_on"] = over()
    card.word.value = 1
    torch.cuda.synchronize()


def copy_on(card: Card, kind: int, below: int) -> Callable[[], bool]:
    """Copies by a stream of that priority."""
    stream = card.stream(below)
    card.copy(kind, MIB, stream)
    card.call("cudaEventRecord", card.done, stream)
    return lambda: card.cuda.cudaEventQuery(card.done) == 0


def kernel(card: Card) -> Callable[[], bool]:
    """Launches by torch's stream."""
    card.data * 2
    done = torch.cuda.Event()
    done.record()
    return done.query


def inside(card: Card, found: dict[str, Any], work: Callable[[], object], by_function: bool = False) -> None:
    """Which calls another thread can make while the main one is in ``work``, which may wait for the default stream, and
    that for the word. ``by_function``: a host function sets the word, behind work of the card, else that thread."""
    card.wait(card.waiting)
    end = card.event()
    card.call("cudaEventRecord", end, card.waiting)
    card.call("cudaStreamWaitEvent", None, end, 0)
    begun = time.monotonic()

    def set_word(_: object) -> None:
        found["function_s"] = time.monotonic() - begun
        card.word.value = 1

    function = HOST_FUNCTION(set_word)
    if by_function:
        stream = card.stream(1)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.value or 0)):
            torch.cuda._sleep(1_500_000_000)  # due while the main thread is in its call
        card.copy(FROM_CARD, 8192, stream)
        card.call("cudaLaunchHostFunc", stream, function, None)
    spare = card.event()
    calls: dict[str, Callable[[], int]] = {
        "cudaSetDevice": lambda: card.cuda.cudaSetDevice(0),
        "cudaEventQuery": lambda: card.cuda.cudaEventQuery(card.done),
        "cudaStreamWaitEvent": lambda: card.cuda.cudaStreamWaitEvent(card.other, card.done, 0),
        "cudaEventRecord": lambda: card.cuda.cudaEventRecord(spare, card.other),
        "cudaEventSynchronize": lambda: card.cuda.cudaEventSynchronize(card.done),
    }
    codes: dict[str, int] = {}
    found["blocked"] = []

    def other_thread() -> None:
        time.sleep(INSIDE_S)
        for name, call in calls.items():
            one = threading.Thread(target=lambda name=name, call=call: codes.update({name: call()}), daemon=True)
            one.start()
            one.join(BLOCKED_S)
            if one.is_alive():
                found["blocked"].append(name)
        if not by_function:
            card.word.value = 1

    thread = threading.Thread(target=other_thread, daemon=True)
    thread.start()
    work()
    found["held_s"] = time.monotonic() - begun
    thread.join()
    torch.cuda.synchronize()
    found["errors"] = {name: code for name, code in codes.items() if code}


def to_pageable(card: Card) -> None:
    """A copy to memory that is not pinned: it waits for all of its stream."""
    there = (ctypes.c_char * MIB)()
    card.call("cudaMemcpyAsync", there, pointer(card.data.data_ptr()), ctypes.c_size_t(MIB), FROM_CARD, None)


def new_kernels(card: Card) -> None:
    """Kernels that were not loaded before."""
    torch.special.bessel_j0(card.data)
    torch.cumprod(card.data, 0)


def allocate(card: Card, nbytes: int) -> ctypes.c_void_p:
    """Memory of the card."""
    made = ctypes.c_void_p()
    card.call("cudaMalloc", ctypes.byref(made), ctypes.c_size_t(nbytes))
    return made


def register(card: Card) -> None:
    """Pins memory, as the leg does where it needs more."""
    more = mmap.mmap(-1, 8 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(more))
    card.call("cudaHostRegister", pointer(address), ctypes.c_size_t(8 * MIB), PORTABLE | MAPPED)


def frees(card: Card, found: dict[str, Any]) -> None:
    """Of memory that was allocated before."""
    made = allocate(card, MIB)
    inside(card, found, lambda: card.call("cudaFree", made))


CASES: dict[str, Callable[[Card, dict[str, Any]], None]] = {
    "memory": memory,
    "fault": fault,
    "host function": lambda card, found: inside(card, found, lambda: to_pageable(card), by_function=True),
    "in nothing": lambda card, found: inside(card, found, lambda: time.sleep(2 * INSIDE_S)),
    "in a copy to pageable memory": lambda card, found: inside(card, found, lambda: to_pageable(card)),
    "in item()": lambda card, found: inside(card, found, lambda: card.data[0].item()),
    "in the first launch of a kernel": lambda card, found: inside(card, found, lambda: new_kernels(card)),
    "in cudaMalloc": lambda card, found: inside(card, found, lambda: allocate(card, 64 * MIB)),
    "in cudaFree": frees,
    "in cudaHostRegister": lambda card, found: inside(card, found, lambda: register(card)),
    "in cudaStreamCreate": lambda card, found: inside(card, found, lambda: card.stream(0)),
    "a kernel": lambda card, found: beside(card, found, lambda: kernel(card)),
    "a copy from the card": lambda card, found: beside(card, found, lambda: copy_on(card, FROM_CARD, 1)),
    "a copy to the card": lambda card, found: beside(card, found, lambda: copy_on(card, TO_CARD, 0)),
    "a copy of the same priority": lambda card, found: beside(card, found, lambda: copy_on(card, TO_CARD, 2)),
    "a copy beside 32 such streams": lambda card, found: beside(card, found, lambda: copy_on(card, TO_CARD, 2), 32),
}
"""Those that are judged come first. In ...: what the main thread is in; a ...: what is done while streams wait."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[*CASES], required=True)
    case = CASES[parser.parse_args().case]
    found: dict[str, Any] = {}
    card = Card()
    found["priorities"] = card.priorities
    watched(lambda: case(card, found), found)


if __name__ == "__main__":
    sys.exit(main())
