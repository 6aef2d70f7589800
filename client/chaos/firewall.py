"""A firewall around the processes of one node: packets that get lost, and calls of connect() that fail.

A control group holds the processes, and small BPF programs that the kernel runs for its traffic. Connections of the
coordinator's port pass always, and so does what the processes send each other: a host that is cut off has its own
addresses. A program is gone with its descriptor, so that nothing outlives this process. Needs root, cgroup2 and Linux
5.18.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import Literal

from bagua.base.control_group import PROCESSES, own_group
from bagua.chaos.patience import alive

Side = Literal["in", "out"]

_SYSTEM_CALL = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _LINK_CREATE = 5, 28  # commands of bpf()
_PACKET, _ADDRESS = 8, 18  # types of programs: BPF_PROG_TYPE_CGROUP_SKB, BPF_PROG_TYPE_CGROUP_SOCK_ADDR
_ATTACH: dict[Side, int] = {"in": 0, "out": 1}
_CONNECT = 10
_LOAD_BYTES, _BIND, _SET_RESULT = 26, 64, 187  # functions of the kernel
_SOURCE, _TARGET, _PORTS, _HEADERS = 12, 16, 20, 24  # offsets in a packet of TCP over IPv4, and bytes that are read
_USER_PORT = 24  # offset in struct bpf_sock_addr
_STACK = 10  # register that holds the end of the stack


class Firewall:
    """Control group of a node. ``prefix``: a command that becomes the node's first process, inside. ``address``: of the
    node's data, from which its connections come too. ``port``: the coordinator's, which is left alone.
    """

    def __init__(self, name: str, address: str, port: int) -> None:
        """Raises OSError where there is no such control group, or the kernel takes no programs for it."""
        self.address = address
        self._port = socket.htons(port)  # programs read packets and the kernel's structures as they lie there
        if (group := own_group()) is None:
            raise FileNotFoundError("cgroup2 is not mounted")
        for left in group.glob("chaos-*-*"):  # of a process that was killed
            if not alive(int(left.name.split("-")[1])):
                with contextlib.suppress(OSError):
                    left.rmdir()
        self._folder = group / f"chaos-{os.getpid()}-{name}"
        self._folder.mkdir()
        # The shell enters the group before it becomes the daemon.
        self.prefix = ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / PROCESSES))
        self._always = contextlib.ExitStack()
        try:
            self._always.enter_context(self._attached(_ADDRESS, _CONNECT, _bound_to(address)))
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Takes the programs away; the group stays while a process is in it."""
        self._always.close()
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    @contextlib.contextmanager
    def dropped(self, sides: Collection[Side], peer: str = "") -> Iterator[None]:
        """Loses what comes in, or goes out, while the context lasts. ``peer``: of this address alone."""
        with contextlib.ExitStack() as stack:
            for side in sides:
                code = _lost(self._port, self.address, peer, _SOURCE if side == "in" else _TARGET)
                stack.enter_context(self._attached(_PACKET, _ATTACH[side], code))
            yield

    @contextlib.contextmanager
    def refused(self, number: int) -> Iterator[None]:
        """Lets connect() fail with that errno while the context lasts."""
        with self._attached(_ADDRESS, _CONNECT, _failing(self._port, number)):
            yield

    @contextlib.contextmanager
    def _attached(self, kind: int, place: int, code: bytes) -> Iterator[None]:
        text, license_text = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
        texts = (ctypes.addressof(text), ctypes.addressof(license_text))
        # 44: log, version, flags, name and device.
        loading = struct.pack("<IIQQ44xI", kind, len(code) // 8, *texts, place)
        with _open(_bpf(_PROG_LOAD, loading)) as program, _open(os.open(self._folder, os.O_RDONLY)) as group:
            link = _bpf(_LINK_CREATE, struct.pack("<IIII", program, group, place, 0))
        with _open(link):
            yield


def reason_against() -> str:
    """Says why there can be no firewall here; empty if there can."""
    try:
        firewall = Firewall("probe", "127.0.0.1", 1)
    except OSError as error:
        return error.strerror or str(error)
    try:
        with firewall.dropped(("in", "out"), "127.0.0.2"), firewall.refused(1):
            return ""
    except OSError as error:
        return error.strerror or str(error)
    finally:
        firewall.close()


@contextlib.contextmanager
def _open(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _bpf(command: int, attributes: bytes) -> int:
    number = _SYSTEM_CALL.get(os.uname().machine)
    if number is None:
        raise OSError(f"the system call bpf() has no number here for {os.uname().machine}")
    buffer = ctypes.create_string_buffer(attributes, 128)  # kernels take zeros behind the fields that they know
    result: int = ctypes.CDLL(None, use_errno=True).syscall(number, command, buffer, 128)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"bpf(): {os.strerror(ctypes.get_errno())}")
    return result


# Instructions of BPF. Registers: 0 result, 1 to 5 arguments, 10 the end of the stack.


def _instruction(code: int, to: int = 0, of: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("<BBhi", code, to | of << 4, offset, value)


def _set(register: int, value: int) -> bytes:
    return _instruction(0xB7, register, value=value)


def _point(register: int, below: int) -> bytes:
    """Lets the register point into the stack."""
    return _instruction(0xBF, register, _STACK) + _instruction(0x07, register, value=-below)


def _store(below: int, value: bytes) -> bytes:
    """Puts four bytes into the stack."""
    return _instruction(0x62, _STACK, offset=-below, value=struct.unpack("<i", value)[0])


def _call(function: int) -> bytes:
    return _instruction(0x85, value=function)


def _return(value: int) -> bytes:
    return _set(0, value) + _instruction(0x95)


def _load(size: int, of: int, offset: int) -> bytes:
    """Loads two or four bytes into register 2."""
    return _instruction(0x69 if size == 2 else 0x61, 2, of, offset)


def _unless(register: int, equal: bool, value: int, then: bytes) -> bytes:
    """Does ``then`` unless the register is equal, or is different."""
    return _instruction(0x15 if equal else 0x55, register, offset=len(then) // 8, value=value) + then


def _passes_if(register: int, equal: bool, value: int) -> bytes:
    return _unless(register, not equal, value, _return(1))


def _address(text: str) -> bytes:
    return socket.inet_aton(text)


def _bound_to(address: str) -> bytes:
    """Binds each new connection to the address: a struct sockaddr_in of 16 bytes lies on the stack."""
    fields = (struct.pack("<HH", socket.AF_INET, 0), _address(address), bytes(4), bytes(4))
    name = b"".join(_store(16 - 4 * index, field) for index, field in enumerate(fields))
    return name + _point(2, 16) + _set(3, 16) + _call(_BIND) + _return(1)


def _failing(port: int, number: int) -> bytes:
    others = _load(4, 1, _USER_PORT) + _passes_if(2, True, port)
    return others + _set(1, -number) + _call(_SET_RESULT) + _return(0)


def _lost(port: int, own: str, peer: str, end: int) -> bytes:
    # A packet that is too short for a port passes.
    code = _set(2, 0) + _point(3, _HEADERS) + _set(4, _HEADERS) + _call(_LOAD_BYTES) + _passes_if(0, False, 0)
    for offset in (_PORTS, _PORTS + 2):  # the coordinator's may be either end
        code += _load(2, _STACK, offset - _HEADERS) + _passes_if(2, True, port)
    code += _load(4, _STACK, end - _HEADERS)
    for passes, address in ((True, "127.0.0.1"), (True, own), *([(False, peer)] if peer else [])):
        (number,) = struct.unpack("<i", _address(address))
        code += _passes_if(2, passes, number)
    return code + _return(0)
