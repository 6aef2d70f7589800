"""The strict fake NCCL: one loaded plugin behind one version of its table, with every rule of the interface checked at
each call. What breaks a rule raises AssertionError; what the plugin refuses raises NetError."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

from netrig import abi

PATIENCE_S = 60.0
"""After so long nothing happened a wait has hung: the tests' machines may be loaded."""
CANARY = 0x5A5A5A5A


class NetError(RuntimeError):
    """A call of the plugin returned an error. ``code``: its ncclResult."""

    def __init__(self, call: str, code: int, lines: list[tuple[int, str]]) -> None:
        super().__init__(f"{call}: {code}; the log: {lines[-3:]}")
        self.call, self.code = call, code


def build_logger(folder: Path) -> Path:
    """Compiles logger.cpp."""
    target = folder / "logger.so"
    source = Path(__file__).with_name("logger.cpp")
    command = [os.environ.get("CXX", "g++"), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, str(source), "-o", str(target)], check=True, timeout=120)
    return target


class Logger:
    """Lines that the plugin wrote through NCCL's logger."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self.address = ctypes.cast(self._library.keep_line, c_void_p)
        self._buffer = ctypes.create_string_buffer(1 << 21)
        self._lines: list[tuple[int, str]] = []

    @property
    def lines(self) -> list[tuple[int, str]]:
        """(level, text), oldest first."""
        self._library.take_lines.restype = c_size_t
        length = self._library.take_lines(self._buffer, c_size_t(len(self._buffer)))
        for line in self._buffer.raw[:length].decode().splitlines():
            level, _, text = line.partition(" ")
            self._lines.append((int(level) if level.isdigit() else -1, text if level.isdigit() else line))
        return self._lines

    def warnings(self) -> list[str]:
        return [text for level, text in self.lines if level == abi.LOG_WARN]


class FakeNccl:
    """A plugin, loaded and initialised as by one communicator (v11: one context)."""

    def __init__(self, library: Path, logger: Logger, version: int = 11, start: bool = True) -> None:
        self.version, self.logger, self.library = version, logger, ctypes.CDLL(str(library))
        self.table: Any = abi.TABLES[version].in_dll(self.library, f"ncclNetPlugin_v{version}")
        self.context = c_void_p()
        self._profiler = abi.PROFILER(lambda *_: abi.SUCCESS)
        self._config = abi.CommConfig(-1)
        self.length_type = c_int if version == 8 else c_size_t
        self.open: list[Any] = []
        if start:
            self.start()

    def check(self, call: str, *arguments: Any) -> None:
        """Calls a function of the table. Raises NetError."""
        code = getattr(self.table, call)(*arguments)
        assert 0 <= code <= 7, f"{call} returned {code}, which is no ncclResult_t"
        if code != abi.SUCCESS:
            raise NetError(call, code, self.logger.lines)

    def start(self) -> None:
        if self.version == 11:
            profiler = ctypes.cast(self._profiler, c_void_p)
            self.context = c_void_p(CANARY)
            self.check("init", byref(self.context), 0x1234, byref(self._config), self.logger.address, profiler)
            assert self.context.value != CANARY, "init left the context as it was"
        else:
            self.check("init", self.logger.address)

    def finish(self) -> None:
        """Closes what is open, and finalizes where the version can."""
        for comm in reversed(list(self.open)):
            comm.close()
        if self.version == 11:
            self.check("finalize", self.context)

    def devices(self) -> int:
        count = c_int(-1)
        self.check("devices", byref(count))
        assert count.value >= 0
        return count.value

    def properties(self, device: int) -> Any:
        found = abi.PROPERTIES[self.version]()
        ctypes.memset(byref(found), 0xA5, ctypes.sizeof(found))
        self.check("getProperties", device, byref(found))
        return found

    def device_named(self, name: str) -> int:
        names = [self.properties(device).name.decode() for device in range(self.devices())]
        return names.index(name)

    # ---- connections

    def listen(self, device: int = 0) -> Listener:
        handle = (ctypes.c_ubyte * (abi.HANDLE_BYTES + 64))(*[0xC3] * (abi.HANDLE_BYTES + 64))
        comm = c_void_p()
        self.check("listen", *self._context(), device, byref(handle), byref(comm))
        assert comm.value, "listen succeeded without a comm"
        assert bytes(handle[abi.HANDLE_BYTES :]) == b"\xc3" * 64, "listen wrote beyond the 128 bytes of the handle"
        return Listener(self, comm, bytes(handle[: abi.HANDLE_BYTES]))

    def connector(self, handle: bytes, device: int = 0) -> Connector:
        return Connector(self, handle, device)

    def pair(self, device: int = 0) -> tuple[Comm, Comm]:
        """(sender, receiver) of one connection inside this process."""
        listener = self.listen(device)
        sender, receiver = meet(self.connector(listener.handle, device), listener)
        listener.close()
        return sender, receiver

    def _context(self) -> tuple[c_void_p, ...]:
        return (self.context,) if self.version == 11 else ()


class Listener:
    """The result of ``listen``."""

    def __init__(self, nccl: FakeNccl, comm: c_void_p, handle: bytes) -> None:
        self.nccl, self.comm, self.handle = nccl, comm, handle
        nccl.open.append(self)

    def accept(self) -> Comm | None:
        """One call: None where NCCL would call again."""
        comm, device_comm = c_void_p(CANARY), c_void_p()
        self.nccl.check("accept", self.comm, byref(comm), byref(device_comm))
        assert comm.value != CANARY, "accept left the comm as it was"
        assert not device_comm.value, "accept made a device comm that nobody asked for"
        return Comm(self.nccl, comm, sends=False) if comm.value else None

    def close(self) -> None:
        if self in self.nccl.open:
            self.nccl.open.remove(self)
            self.nccl.check("closeListen", self.comm)


class Connector:
    """The sender's calls of ``connect`` with one handle. NCCL keeps the handle where it is between the calls: plugins
    may store their state in it."""

    def __init__(self, nccl: FakeNccl, handle: bytes, device: int) -> None:
        self.nccl, self.device = nccl, device
        self._handle = (ctypes.c_ubyte * abi.HANDLE_BYTES)(*handle)

    def connect(self) -> Comm | None:
        """One call: None where NCCL would call again."""
        nccl, comm, device_comm = self.nccl, c_void_p(CANARY), c_void_p()
        arguments = (*nccl._context(), self.device, byref(self._handle), byref(comm), byref(device_comm))
        nccl.check("connect", *arguments)
        assert comm.value != CANARY, "connect left the comm as it was"
        assert not device_comm.value, "connect made a device comm that nobody asked for"
        return Comm(nccl, comm, sends=True) if comm.value else None


def meet(connector: Connector, listener: Listener) -> tuple[Comm, Comm]:
    """(sender, receiver): both called in turn until both are there."""
    sender: Comm | None = None
    receiver: Comm | None = None
    deadline = time.monotonic() + PATIENCE_S
    while sender is None or receiver is None:
        sender = sender or connector.connect()
        receiver = receiver or listener.accept()
        assert time.monotonic() < deadline, f"no connection: sender {sender}, receiver {receiver}"
        if sender is None or receiver is None:
            os.sched_yield()
    return sender, receiver


class Memory:
    """Host memory that is registered with one comm, between two guards."""

    GUARD = 64

    def __init__(self, comm: Comm, size: int, offset: int = 0, fill: int = 0xEE) -> None:
        self.comm, self.size = comm, size
        self._whole = (ctypes.c_ubyte * (size + 2 * self.GUARD + offset))()
        ctypes.memset(self._whole, fill, len(self._whole))
        self._fill, self._start = fill, self.GUARD + offset
        self.address = ctypes.addressof(self._whole) + self._start
        self.view = memoryview(self._whole).cast("B")[self._start : self._start + size]
        self.handle = c_void_p()
        comm.nccl.check("regMr", comm.comm, self.address, size, abi.PTR_HOST, byref(self.handle))

    def check_guards(self) -> None:
        whole = memoryview(self._whole).cast("B")
        guard = bytes([self._fill]) * self.GUARD
        assert whole[self._start - self.GUARD : self._start] == guard, "the plugin wrote before the buffer"
        end = self._start + self.size
        assert whole[end : end + self.GUARD] == guard, "the plugin wrote behind the buffer"

    def release(self) -> None:
        self.comm.nccl.check("deregMr", self.comm.comm, self.handle)


class Request:
    """A request in flight. Its memory is kept for so long."""

    def __init__(self, comm: Comm, value: int, memory: Memory | None) -> None:
        self.comm, self.value, self.memory = comm, value, memory
        self.size: int | None = None

    @property
    def done(self) -> bool:
        return self.size is not None

    def test(self) -> bool:
        """One call of ``test``. Raises NetError, after which the request is not tested again."""
        assert not self.done, "NCCL never tests a request that is done"
        done, sizes = c_int(CANARY), (c_int * 8)(*[CANARY] * 8)
        try:
            self.comm.nccl.check("test", c_void_p(self.value), byref(done), sizes)
        except NetError:
            self.comm.live.pop(self.value, None)
            raise
        assert done.value in (0, 1), f"test left done = {done.value}"
        assert list(sizes[1:]) == [CANARY] * 7, "test wrote sizes that nobody asked for"
        if done.value:
            self.size = sizes[0]
            del self.comm.live[self.value]
        return bool(done.value)


class Comm:
    """A connection's sending or receiving end."""

    def __init__(self, nccl: FakeNccl, comm: c_void_p, sends: bool) -> None:
        self.nccl, self.comm, self.sends = nccl, comm, sends
        self.live: dict[int, Request] = {}
        nccl.open.append(self)

    def memory(self, data: bytes | int, offset: int = 0) -> Memory:
        """Registered memory: a copy of ``data``, or so many bytes."""
        made = Memory(self, data if isinstance(data, int) else len(data), offset)
        if not isinstance(data, int):
            made.view[:] = data
        return made

    def isend(self, memory: Memory, size: int | None = None, tag: int = 0) -> Request | None:
        """One call: None where NCCL would call again."""
        assert self.sends and len(self.live) < abi.MOST_REQUESTS, "NCCL has at most 32 requests per comm"
        found = c_void_p(CANARY)
        profiled = (None,) if self.nccl.version == 11 else ()
        length = memory.size if size is None else size
        self.nccl.check("isend", self.comm, memory.address, length, tag, memory.handle, *profiled, byref(found))
        return self._requested(found, memory)

    def irecv(self, memory: Memory, tag: int = 0, optional: bool = False) -> Request | None:
        """One call: None where NCCL would call again. ``optional``: as NCCL does with its LL protocols."""
        assert not self.sends and len(self.live) < abi.MOST_REQUESTS, "NCCL has at most 32 requests per comm"
        found = c_void_p(abi.OPTIONAL_RECV_COMPLETION if optional else CANARY)
        data, handles, profiled = c_void_p(memory.address), c_void_p(memory.handle.value), c_void_p()
        sizes, tags = self.nccl.length_type(memory.size), c_int(tag)
        lists = (byref(data), byref(sizes), byref(tags), byref(handles))
        last = (byref(profiled),) if self.nccl.version == 11 else ()
        self.nccl.check("irecv", self.comm, 1, *lists, *last, byref(found))
        return self._requested(found, memory)

    def iflush(self, memory: Memory) -> Request | None:
        """A flush; None: there is nothing to wait for."""
        found = c_void_p()
        data, handles, sizes = c_void_p(memory.address), c_void_p(memory.handle.value), c_int(memory.size)
        self.nccl.check("iflush", self.comm, 1, byref(data), byref(sizes), byref(handles), byref(found))
        return self._requested(found, memory) if found.value else None

    def _requested(self, found: c_void_p, memory: Memory) -> Request | None:
        assert found.value not in (CANARY, abi.OPTIONAL_RECV_COMPLETION), "the call left the request as it was"
        if not found.value:
            return None
        assert found.value not in self.live, "two requests in flight are the same"
        request = self.live[found.value] = Request(self, found.value, memory)
        return request

    def close(self) -> None:
        if self in self.nccl.open:
            self.nccl.open.remove(self)
            self.nccl.check("closeSend" if self.sends else "closeRecv", self.comm)


def wait(*requests: Request, patience_s: float = PATIENCE_S) -> None:
    """Tests them in turn until all are done. Raises NetError."""
    left = list(requests)
    deadline = time.monotonic() + patience_s
    while left:
        before = len(left)
        left = [request for request in left if not request.test()]
        if len(left) == before:
            assert time.monotonic() < deadline, f"{len(left)} requests hang"
            os.sched_yield()
        else:
            deadline = time.monotonic() + patience_s


def post(call: Any, *arguments: Any, **named: Any) -> Request:
    """Calls isend or irecv again while there is no request, as NCCL does."""
    deadline = time.monotonic() + PATIENCE_S
    while (request := call(*arguments, **named)) is None:
        assert time.monotonic() < deadline, "the plugin takes no request though none is in flight for long"
        os.sched_yield()
    assert isinstance(request, Request)
    return request
