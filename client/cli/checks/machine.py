"""The checks of ``bagua doctor``. Each is a function that returns its finding and imports nothing heavy."""

from __future__ import annotations

import ctypes
import ctypes.util
import fcntl
import json
import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from bagua.base import paths, torch_versions
from bagua.base.errors import BaguaError
from bagua.csrc.build import python_header

OK, WARN, FAIL = "ok", "warn", "fail"
DEFAULT_PORT = 7670
OLDEST_PYTHON = (3, 11)
GIB = 1 << 30
COMMAND_DEADLINE_S = 60.0
T = TypeVar("T")

EXAMPLES = 'pip install "bagua[examples]"'


@dataclass(frozen=True)
class Finding:
    """``status``: ok, warn (works, but not all of it, or not fast) or fail (something needed is missing)."""

    name: str
    status: str
    detail: str
    fix: str = ""


def _output(*command: str) -> tuple[int, str]:
    """Returns (exit code, standard output and error) of a short program; 127 if it can't be run."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout


def ask(arguments: Sequence[str], kind: Callable[..., T], deadline_s: float, whose: str, doing: str) -> T:
    """Runs a Python process of its own, and returns the JSON that it prints, as a ``kind``: opening a foreign library
    takes memory, and may hang or crash. Where it does, ``problem`` of the ``kind`` says so. Raises nothing."""
    try:
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s)
        return kind(**json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return kind(problem=f"{whose} did not answer within {deadline_s:.0f} s")
    except (OSError, ValueError, TypeError):
        return kind(problem=f"{doing} ended the process that did it")


def _installed(*names: str) -> tuple[str, str] | None:
    """Returns (name, version) of the first of these distributions that is installed. Nothing is imported."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _amount(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / (1 << 20):.0f} MiB"


def python() -> Finding:
    version = sys.version.split()[0]
    if sys.version_info < OLDEST_PYTHON:
        return Finding("Python", FAIL, version, "Install Python 3.11 or newer.")
    return Finding("Python", OK, f"{version} ({sys.executable})")


def compiler() -> Finding:
    """A C++17 compiler that works: it compiles three lines."""
    program = os.environ.get("CXX") or "g++"
    fix = "Install g++ 9 or newer (Debian, Ubuntu: apt-get install g++), or name another compiler in CXX."
    if not shutil.which(program):
        return Finding("C++ compiler", FAIL, f"{program} was not found", fix)
    _, text = _output(program, "--version")
    version = (text.splitlines() or [program])[0]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "three_lines.cpp"
        source.write_text(
            "#include <atomic>\n#include <optional>\nint main() { return std::optional<int>(0).value(); }\n"
        )
        code, text = _output(program, "-std=c++17", "-pthread", str(source), "-o", str(source.with_suffix("")))
    if code:
        return Finding("C++ compiler", FAIL, f"{version} can't compile: {text.strip().splitlines()[0]}", fix)
    return Finding("C++ compiler", OK, version)


def python_headers() -> Finding:
    """Python.h, which the native core includes. Debian has it in a package of its own."""
    header = python_header()
    if not header.is_file():
        fix = "Install them (Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)."
        return Finding("Python headers", FAIL, f"{header} is not there", fix)
    return Finding("Python headers", OK, str(header.parent))


def ninja() -> Finding:
    """The build tool of torch.utils.cpp_extension."""
    # pip puts the program beside the interpreter, which need not be on the PATH.
    program = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    code, text = _output(program, "--version") if program else (127, "")
    if code:
        return Finding("ninja", FAIL, "not found", "pip install ninja")
    return Finding("ninja", OK, text.partition(".git")[0].strip())  # pip's says 1.11.1.git.kitware…


def torch() -> Finding:
    """The version of torch, read without importing it."""
    found = _installed("torch")
    if found is None:
        return Finding("torch", FAIL, "not installed", "pip install torch")
    if torch_versions.numbers(found[1]) < torch_versions.OLDEST:
        oldest = torch_versions.minor(torch_versions.TESTED[0])
        return Finding("torch", FAIL, f"{found[1]} is too old", f"pip install --upgrade torch ({oldest} or newer)")
    if torch_versions.numbers(found[1]) > torch_versions.NEWEST:
        newest = torch_versions.minor(torch_versions.TESTED[-1])
        fix = f"It may work all the same. A tested one: pip install 'torch=={newest}.*'"
        return Finding("torch", WARN, f"{found[1]} is untested: tests ran with {torch_versions.TESTED_WORDS}", fix)
    return Finding("torch", OK, found[1])


def shared_memory() -> Finding:
    """/dev/shm, which torch's data loaders use; the service itself uses memfd."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(
            "/dev/shm", WARN, f"can't be used: {error.strerror}", "Mount a tmpfs there: DataLoader needs it."
        )
    size = status.f_blocks * status.f_frsize
    if size < GIB // 4:  # Docker gives 64 MiB by default
        fix = "Containers: docker run --shm-size=2g. Only DataLoader workers need it; the service uses memfd."
        return Finding("/dev/shm", WARN, f"{_amount(size)}: small for DataLoader workers", fix)
    return Finding("/dev/shm", OK, _amount(size))


def memfd() -> Finding:
    """Anonymous shared memory with seals, in which gradients live."""
    try:
        descriptor = os.memfd_create("bagua-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, 1 << 20)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return Finding("memfd", FAIL, f"does not work: {error}", "A Linux kernel 3.17 or newer is needed.")
    return Finding("memfd", OK, "works, with seals")


def locked_memory() -> Finding:
    """The limit of locked memory: GPUs pin the buckets; without a GPU it does not matter."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", OK, "unlimited")
    if ctypes.util.find_library("cuda"):
        return Finding("locked memory", WARN, _amount(soft), "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    return Finding("locked memory", OK, f"{_amount(soft)}: enough without a GPU")


def cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        return Finding("cores", WARN, "1: communication can't run beside computation", "Give it two cores or more.")
    return Finding("cores", OK, str(count))


def memory() -> Finding:
    numbers = {
        key: int(value.split()[0]) * 1024
        for key, _, value in (line.partition(":") for line in Path("/proc/meminfo").read_text().splitlines())
    }
    available = numbers.get("MemAvailable", numbers["MemFree"])  # kernels before 3.14 don't tell it
    text = f"{_amount(available)} of {_amount(numbers['MemTotal'])} available"
    if available < GIB:
        return Finding("memory", WARN, text, "Each rank needs a few hundred MiB for torch alone: close something.")
    return Finding("memory", OK, text)


def file_descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 512:
        return Finding("open files", WARN, f"at most {soft}", f"ulimit -n {min(4096, hard)}")
    return Finding("open files", OK, f"at most {soft}")


def network() -> Finding:
    """Interfaces with an IPv4 address; loopback must work."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        return Finding("network", FAIL, f"loopback does not work: {error.strerror}", "ip link set lo up")
    addresses = [f"{name} {address}" for _, name in socket.if_nameindex() if (address := _ipv4(name))]
    return Finding("network", OK, ", ".join(addresses))


def _ipv4(interface: str) -> str | None:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # A name has 16 bytes with its NUL.
            packed = fcntl.ioctl(probe.fileno(), siocgifaddr, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(packed[20:24])  # struct ifreq: name, 16 bytes; family and port, 4; address


def folders() -> Finding:
    """State and cache folders: made if they are not there, writable, of this user alone."""
    found = []
    for folder, variable in ((paths.state_dir(), "BAGUA_STATE_DIR"), (paths.cache_dir(), "BAGUA_CACHE_DIR")):
        try:
            found.append(str(paths.make_private_dir(folder)))
        except BaguaError as error:
            return Finding("folders", FAIL, str(error), f"Name another folder in {variable}.")
    return Finding("folders", OK, ", ".join(found))


def port() -> Finding:
    """The default port of the coordinator."""
    with socket.socket() as probe:
        # As the coordinator: connections that are over don't count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            fix = "Fine if it is a coordinator; else start yours with --listen 127.0.0.1:PORT."
            return Finding("port", WARN, f"{DEFAULT_PORT} can't be used: {error.strerror}", fix)
    return Finding("port", OK, f"{DEFAULT_PORT} is free for a coordinator")


def scikit_learn() -> Finding:
    """The digits that the example learns come with scikit-learn."""
    found = _installed("scikit-learn")
    if found is None:
        return Finding("scikit-learn", WARN, "not installed: only the example digits needs it", EXAMPLES)
    return Finding("scikit-learn", OK, found[1])


CHECKS: tuple[Callable[[], Finding], ...] = (
    python,
    compiler,
    python_headers,
    ninja,
    torch,
    memfd,
    shared_memory,
    locked_memory,
    file_descriptors,
    cores,
    memory,
    network,
    folders,
    port,
    scikit_learn,
)
