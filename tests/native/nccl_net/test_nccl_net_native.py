"""Builds and runs the native tests of the network plugin: plain, under ASan + UBSan, and under TSan.

They call the plugin's tables as NCCL does, both ends in one process, on loopback.
"""

import functools
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bagua import csrc

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build as native  # noqa: E402


def build(name, folder, full=True):
    """The plugin, what it is linked with, the harness, the suites; in as few units as names without linkage allow."""
    core = native.CORE
    base = [core / "base" / f"{name}.cpp" for name in ("fd", "random", "scarcity", "sha256", "text")]
    units = [
        *(unit for files in native.groups_of("nccl_net") for unit in native.join(files, folder)),
        *native.join(sorted(HERE.glob("*.cpp")), folder),
        *[*base, *sorted((core / "net").glob("*.cpp")), core / "transport" / "stream_count.cpp"],
        HERE.parent / "harness.cpp",
    ]
    return native.build(name, folder, units, *([] if full else native.LEAN[name]), f"-I{HERE}")


# ASan runs in every test run; TSan, and the plain build, with --full.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "asan" else pytest.mark.full) for name in ("plain", "asan", "tsan")],
)
def check(request):
    """``check(tests, **variables)``: runs them under one build, with settings of the plugin."""
    name, full = request.param, request.config.getoption("--full")
    made = functools.cache(lambda: build(name, native.cache_folder(), full))
    return lambda *tests, **variables: native.check(name, made, *tests, **variables)


# Helpers join in wherever the machine has two cores or twenty.
@pytest.mark.timeout(600)  # the first one of a build waits for the compiler
@pytest.mark.parametrize("helpers", ["0", "2"])
def test_suites(check, helpers):
    """All of them with helper threads, what moves large messages without them."""
    more = ["parts_test", "small_test"] if helpers == "2" else []
    check("fault_test", "transfer_test", *more, BAGUA_NET_THREADS=helpers)


@pytest.mark.timeout(600)
def test_streams_and_statistics(check, tmp_path):
    """One line for each end of a connection, when it is closed."""
    stats = tmp_path / "statistics"
    check("spread_test", BAGUA_NET_STATS=str(stats))
    figures = [json.loads(line) for line in stats.read_text().splitlines()]
    assert sorted(each["direction"] for each in figures) == ["receive", "receive", "send", "send"]
    for each in figures:
        assert each["bytes"] == sum(each["stream_bytes"]) + each["inline_bytes"] > 4 << 20
        assert each["messages"] > 4 and not each["failed"]


@pytest.mark.timeout(600)
def test_other_settings(check, tmp_path):
    """IPv6; small chunks on many sockets, nothing beside the header; statistics that can't be written; no patience."""
    settings = {"BAGUA_NET_STREAMS": "32", "BAGUA_NET_CHUNK": "16K", "BAGUA_NET_INLINE": "0", "BAGUA_NET_HELP": "0"}
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            settings["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    except OSError:
        pass  # this machine's loopback has no IPv6 address
    settings |= {"BAGUA_NET_THREADS": "2", "BAGUA_NET_STATS": str(tmp_path / "no" / "folder")}
    check("transfer_test.every_size_arrives_whole", "transfer_test.connections_at_random", **settings)
    check("fault_test.a_listener_that_is_gone", BAGUA_NET_CONNECT_TIMEOUT="1")


@pytest.mark.timeout(600)
def test_the_library_that_is_shipped(request, check):
    """NCCL opens it beside torch's libraries: only its tables are to be seen, and nothing of theirs is needed. It may
    be closed and opened again."""
    library = str(csrc.net_plugin())
    command = ["nm", "--dynamic", "--defined-only", library]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in shown.splitlines()}
    assert names == {"ncclNetPlugin_v8", "ncclNetPlugin_v11"}
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert not any(word in needed for word in ("torch", "cuda", "nccl.so", "not found")), needed
    if "tsan" not in request.node.name:  # which sees no locks of a library that is built without it
        # What it keeps until the process ends can be reached from the library alone.
        settings = {"BAGUA_NET_THREADS": "2", "BAGUA_TEST_PLUGIN": library, "LSAN_OPTIONS": "detect_leaks=0"}
        check("transfer_test.the_library_is_closed_and_opened_again", **settings)
