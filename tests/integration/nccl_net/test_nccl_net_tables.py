"""Every version's table: name, order, sizes, and properties in which NCCL can believe."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from ctypes import byref
from pathlib import Path

import pytest
from netrig import abi
from netrig.fake import FakeNccl, NetError, wait


@pytest.mark.parametrize("version", abi.VERSIONS)
def test_sizes_are_those_of_nccl(version: int) -> None:
    assert ctypes.sizeof(abi.TABLES[version]) == abi.TABLE_BYTES[version]
    assert ctypes.sizeof(abi.PROPERTIES[version]) == abi.PROPERTIES_BYTES[version]


def symbols(library: Path) -> dict[str, int]:
    """Exported names with the sizes of what they name."""
    shown = subprocess.run(
        ["nm", "--dynamic", "--defined-only", "--print-size", str(library)], capture_output=True, text=True, check=True
    ).stdout
    fields = [line.split() for line in shown.splitlines()]
    return {entry[-1].partition("@")[0]: int(entry[1], 16) for entry in fields if len(entry) == 4}


def test_exported_tables_have_their_sizes(library: Path) -> None:
    found = symbols(library)
    tables = {f"ncclNetPlugin_v{version}": abi.TABLE_BYTES[version] for version in abi.VERSIONS}
    assert tables.items() <= found.items()


def test_nothing_else_is_exported(library: Path) -> None:
    """NCCL opens the plugin beside torch's libraries: names of ours must not meet theirs."""
    foreign = [name for name in symbols(library) if not name.startswith("ncclNetPlugin_v")]
    assert not foreign


def test_loads_without_torch_and_cuda(library: Path) -> None:
    needed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout
    assert not any(word in needed for word in ("torch", "cuda", "nccl.so", "not found")), needed


@pytest.mark.parametrize("version", abi.VERSIONS)
def test_functions_stand_where_nccl_calls_them(make: Callable[..., FakeNccl], version: int) -> None:
    """A table in another order, or with other arguments, does not get through a transfer and its end."""
    nccl = make(version)
    for name in abi.arguments(version):
        pointer = ctypes.cast(getattr(nccl.table, name), ctypes.c_void_p).value
        assert pointer or name in abi.OPTIONAL, f"{name} is NULL"
    sender, receiver = nccl.pair()
    source, target = sender.memory(b"in order" * 1000), receiver.memory(9000)
    received, sent = receiver.irecv(target), sender.isend(source)
    assert received and sent
    wait(sent, received)
    assert received.size == sent.size == 8000
    assert target.view[:8000] == source.view
    flushed = receiver.iflush(target)
    if flushed:
        wait(flushed)
    for memory in (source, target):
        memory.check_guards()
        memory.release()


def test_all_versions_have_one_name(make: Callable[..., FakeNccl]) -> None:
    names = {make(version).table.name for version in abi.VERSIONS}
    assert len(names) == 1, names


@pytest.mark.parametrize("version", abi.VERSIONS)
def test_properties(make: Callable[..., FakeNccl], version: int) -> None:
    nccl = make(version)
    assert nccl.devices() == 1
    found = nccl.properties(0)
    assert found.name == b"lo"
    assert found.pciPath is None, "loopback has no PCI device"
    assert found.ptrSupport == abi.PTR_HOST
    assert found.speed > 0 and found.latency >= 0 and found.maxComms >= 1024
    assert found.maxRecvs == 1
    assert found.netDeviceType == 0
    if version == 11:
        assert found.forceFlush == 0
        assert (found.vProps.ndevs, found.vProps.devs[0]) == (1, 0)
        assert found.maxP2pBytes >= 1 << 30 and found.maxCollBytes >= 1 << 30
        assert found.maxMultiRequestSize >= 1


def test_no_such_device(nccl: FakeNccl) -> None:
    for device in (-1, 1, 1000):
        with pytest.raises(NetError):
            nccl.properties(device)
        with pytest.raises(NetError):
            nccl.listen(device)


def test_cuda_pointers_are_refused(nccl: FakeNccl) -> None:
    sender, _ = nccl.pair()
    handle = ctypes.c_void_p()
    with pytest.raises(NetError):
        nccl.check("regMr", sender.comm, 4096, 4096, abi.PTR_CUDA, byref(handle))


def test_grouped_receives_are_refused(nccl: FakeNccl) -> None:
    """maxRecvs is 1: NCCL never does it; a plugin that trusted it would write through what isn't there."""
    _, receiver = nccl.pair()
    memory = receiver.memory(64)
    two = (ctypes.c_void_p * 2)(memory.address, memory.address)
    handles = (ctypes.c_void_p * 2)(memory.handle.value, memory.handle.value)
    sizes, tags, request = (ctypes.c_size_t * 2)(32, 32), (ctypes.c_int * 2)(0, 1), ctypes.c_void_p()
    with pytest.raises(NetError):
        nccl.check("irecv", receiver.comm, 2, two, sizes, tags, handles, (ctypes.c_void_p * 2)(), byref(request))


def test_a_garbled_handle_is_refused(nccl: FakeNccl) -> None:
    for handle in (bytes(128), b"\xff" * 128, b"GET / HTTP/1.1\r\n\r\n".ljust(128)):
        with pytest.raises(NetError):
            connector = nccl.connector(handle)
            for _ in range(1000):
                assert connector.connect() is None


def test_network_attributes_are_taken(nccl: FakeNccl) -> None:
    if nccl.table.setNetAttr:
        nccl.check("setNetAttr", nccl.context, byref(abi.NetAttributes()))


def test_contexts_are_apart(make: Callable[..., FakeNccl]) -> None:
    """NCCL has a context per communicator; one's end is not another's."""
    first, second = make(11), make(11)
    sender, receiver = second.pair()
    first.finish()
    request, target = sender.isend(sender.memory(b"x" * 100_000)), receiver.memory(100_000)
    received = receiver.irecv(target)
    assert request and received
    wait(request, received)
    assert bytes(target.view) == b"x" * 100_000
    first.start()
