"""Builds and runs the native tests of the network plugin: plain, under ASan + UBSan, and under TSan.

They call the plugin's tables as NCCL does, both ends in one process, on loopback. By hand:
``python tests/native/nccl_net/test_nccl_net_native.py [plain|asan|tsan] [suite[.test] ...]``.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagua import csrc

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build as native  # noqa: E402

SUITES = ["fault_test", "parts_test", "small_test", "transfer_test"]


def sources(folder):
    """The plugin, what it is linked with, the harness, the suites; in as few units as names without linkage allow."""
    core = native.CORE
    base = [core / "base" / f"{name}.cpp" for name in ("fd", "random", "scarcity", "sha256", "text")]
    return [
        *(unit for files in native.groups_of("nccl_net") for unit in native.join(files, folder)),
        *native.join(sorted(HERE.glob("*.cpp")), folder),
        *sorted((core / "net").glob("*.cpp")),
        *native.join([*base, core / "transport" / "stream_count.cpp", HERE.parent / "harness.cpp"], folder),
    ]


def build(name, folder, full=True):
    """Compiles and links one build of the test program; returns it. Raises RuntimeError: the compiler's messages."""
    lean = [] if full else native.LEAN[name]
    flags = [*native.COMMON, *native.BUILDS[name], *lean, *native.INCLUDES, f"-I{HERE.parent}", f"-I{HERE}"]

    def compile_unit(source):
        headers = [*sorted((native.CSRC / "nccl_net").glob("*.h")), *sorted(HERE.glob("*.h"))]
        key = native.content_key(
            [*native.with_headers(source), *headers], native.compiler_version(), *flags, str(source)
        )
        output = folder / f"nccl-net-{name}-{source.stem}-{key}.o"
        if not output.exists():
            native.run_compiler([*flags, "-c", str(source)], output)
        return output

    with native.locked(folder, f"nccl-net-{name}"):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_unit, sources(folder)))
        key = native.content_key([], *(str(path) for path in objects))
        program = folder / f"nccl-net-{name}-{key}.program"
        if not program.exists():
            native.run_compiler([*flags, *(str(path) for path in objects)], program)
    return program


def run(name, program, arguments, **variables):
    """Runs suites, with settings of the plugin."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        return native.run(name, program, arguments)


# ASan runs in every test run; TSan, and the plain build, with --full.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "asan" else pytest.mark.full) for name in ("plain", "asan", "tsan")],
)
def program(request):
    """Name of the build and its program."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{native.COMPILER}' is not in PATH")
    return request.param, build(request.param, native.cache_folder(), request.config.getoption("--full"))


def check(result):
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"


# Helpers join in wherever the machine has two cores or twenty.
@pytest.mark.timeout(600)  # the first one of a build waits for the compiler
@pytest.mark.parametrize("helpers", ["0", "2"])
def test_suites(program, helpers):
    """All of them with helper threads, what moves large messages without them."""
    check(run(*program, SUITES if helpers == "2" else ["fault_test", "transfer_test"], BAGUA_NET_THREADS=helpers))


@pytest.mark.timeout(600)
def test_streams_and_statistics(program, tmp_path):
    """One line for each end of a connection, when it is closed."""
    stats = tmp_path / "statistics"
    check(run(*program, ["spread_test"], BAGUA_NET_STATS=str(stats)))
    figures = [json.loads(line) for line in stats.read_text().splitlines()]
    assert sorted(each["direction"] for each in figures) == ["receive", "receive", "send", "send"]
    for each in figures:
        assert each["bytes"] == sum(each["stream_bytes"]) + each["inline_bytes"] > 4 << 20
        assert each["messages"] > 4 and not each["failed"]


@pytest.mark.timeout(600)
def test_other_settings(program, tmp_path):
    """IPv6; small chunks on many sockets, nothing beside the header; statistics that can't be written; no patience."""
    if program[0] == "plain":
        pytest.skip("the sanitizers have it")
    settings = {"BAGUA_NET_STREAMS": "32", "BAGUA_NET_CHUNK": "16K", "BAGUA_NET_INLINE": "0", "BAGUA_NET_HELP": "0"}
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            settings["NCCL_SOCKET_FAMILY"] = "AF_INET6"
    except OSError:
        pass  # this machine's loopback has no IPv6 address
    settings |= {"BAGUA_NET_THREADS": "2", "BAGUA_NET_STATS": str(tmp_path / "no" / "folder")}
    check(run(*program, ["transfer_test.every_size_arrives_whole", "transfer_test.connections_at_random"], **settings))
    check(run(*program, ["fault_test.a_listener_that_is_gone"], BAGUA_NET_CONNECT_TIMEOUT="1"))


@pytest.mark.timeout(600)
def test_the_library_that_is_shipped(program):
    """NCCL opens it beside torch's libraries: only its tables are to be seen, and nothing of theirs is needed. It may
    be closed and opened again."""
    library = str(csrc.net_plugin())
    command = ["nm", "--dynamic", "--defined-only", library]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in shown.splitlines()}
    assert names == {"ncclNetPlugin_v8", "ncclNetPlugin_v11"}
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    assert not any(word in needed for word in ("torch", "cuda", "nccl.so", "not found")), needed
    if program[0] != "tsan":  # which sees no locks of a library that is built without it
        # What it keeps until the process ends can be reached from the library alone.
        settings = {"BAGUA_NET_THREADS": "2", "BAGUA_TEST_PLUGIN": library, "LSAN_OPTIONS": "detect_leaks=0"}
        check(run(*program, ["transfer_test.the_library_is_closed_and_opened_again"], **settings))


def main(arguments):
    """Builds and runs by hand, with the output on the screen."""
    name = arguments[0] if arguments else "plain"
    result = run(name, build(name, native.cache_folder()), arguments[1:])
    print(result.stdout, end="")
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
