"""Bagua-Net in NVIDIA's own NCCL, without a GPU: NCCL finds it, loads it, and its proxies send over it.

The program real_nccl plays the GPUs. It knows where things lie in single binaries, for x86-64: one for each version
of the interface, 8 to 12. They are looked for in $BAGUA_TEST_NCCL (``deploy/dev.py test`` sets it) and among NVIDIA's
wheels.
By hand: ``BAGUA_TEST_NCCL=.../nvidia/nccl:... pytest tests/native/nccl_net/test_real_nccl.py``.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from bagua import csrc
from bagua.base import net_plugin

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build as native  # noqa: E402


@dataclass(frozen=True)
class Build:
    """A build of NCCL that real_nccl knows: what ncclGetVersion says, the plugin's table that it takes, SHA-256."""

    number: int
    table: int
    sha256: str


BUILDS = {
    "2.21.5": Build(22105, 8, "78df2f31f6db8142ec546a1e5a31cb066f7892d12d2f665b448f8069a08ef807"),
    "2.25.1": Build(22501, 8, "8b80b353c232bd743a9721eac483ffe81e32d4dd5059c080dbc2d21e7def44cf"),
    "2.27.5": Build(22705, 8, "1d9c10322efacde695cf640db1f29fc1586c929f1087f0e1202d2d5e70fb7168"),
    "2.28.9": Build(22809, 11, "1c8618b866734cbdd5401715d6178be763ece283b7f808ecf86dedab211162c1"),
    "2.32.3": Build(23203, 11, "651cf05af28976ca8d996f4e2750e69db1fa427667ee3405b9e576e9d2960eaf"),
}
REFERENCE = "2.28.9"
"""Where the program itself, and what it would not find, are tested more."""
LIBRARY = "lib/libnccl.so.2"
OURS = "network Bagua-Net"
PROGRAM_S = 120

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@functools.cache
def libraries():
    """The builds that are here, by SHA-256: in $BAGUA_TEST_NCCL, and in NVIDIA's wheels of this environment."""
    spec = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) / "nccl" for folder in (spec.submodule_search_locations or [])] if spec else []
    given = [Path(folder) for folder in os.environ.get("BAGUA_TEST_NCCL", "").split(os.pathsep) if folder]
    found = {}
    for folder in [*wheels, *given]:
        if (folder / LIBRARY).is_file():
            with (folder / LIBRARY).open("rb") as file:
                found[hashlib.file_digest(file, "sha256").hexdigest()] = folder / LIBRARY
    return found


def build(version):
    """The program that knows the insides of this version."""
    sources = sorted((HERE / "real_nccl").glob("*.cpp"))
    return native.build("plain", native.cache_folder(), sources, f"-DBAGUA_REAL_NCCL={BUILDS[version].number}")


def runner(version):
    """``run("traffic", **environment)``: the program's result. Without an environment NCCL gets what ranks get."""
    if platform.machine() != "x86_64":
        pytest.skip(f"real NCCL: the layouts are those of builds for x86-64; this is {platform.machine()}")
    library = libraries().get(BUILDS[version].sha256)
    if library is None:
        # what was promised must not be skipped
        assert "BAGUA_TEST_NCCL" not in os.environ, f"no NCCL {version} in $BAGUA_TEST_NCCL"
        pytest.skip(f"real NCCL: needs NVIDIA's wheel of {version}, in $BAGUA_TEST_NCCL or in this environment")
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{native.COMPILER}' is not in PATH")
    program = build(version)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "BAGUA_NET_"))}
    clean["NCCL_SOCKET_IFNAME"] = "lo"

    def start(*arguments, **environment):
        ranks = net_plugin.variables(csrc.net_plugin(), clean)
        return subprocess.run(
            [str(program), str(library), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**clean, **ranks, **environment},
            timeout=PROGRAM_S,
            check=False,
        )

    return start


@pytest.fixture(scope="module")
def run():
    """The program with the build whose insides are tested most."""
    return runner(REFERENCE)


@pytest.fixture(scope="module", params=[version for version in BUILDS if version != REFERENCE])
def run_other(request):
    """The program with another build, and its version."""
    return request.param, runner(request.param)


def passed(result):
    """The lines of a program that found nothing wrong, and what it sent over."""
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"
    lines = result.stdout.splitlines()
    assert lines[0] == OURS, result.stdout
    assert lines[-1] == "0 errors", result.stdout
    return lines


def test_every_communicator_gets_the_plugin(run):
    lines = passed(run("load"))
    assert lines[:-1] == [OURS] * 3


def test_without_its_variable_the_second_communicator_fails(run):
    """NVIDIA/nccl#1978: why net_plugin.variables() has NCCL_NET_PLUGIN_REF_COUNT."""
    result = run("load", NCCL_NET_PLUGIN_REF_COUNT="0")
    assert result.returncode == 1, result.stdout
    assert result.stdout.splitlines()[0] == OURS
    assert "ncclNetInit: error" in result.stdout


@pytest.mark.parametrize("helpers", ["0", "2"])
def test_traffic(run, helpers):
    lines = passed(run("traffic", BAGUA_NET_THREADS=helpers))
    assert sum("slices wrong" in line for line in lines) == 20


@pytest.mark.full
def test_every_version_of_the_table(run_other):
    """NCCL takes the table that is meant for it, and its proxies send over it."""
    version, run = run_other
    loaded = run("load", NCCL_DEBUG="INFO")
    assert loaded.returncode == 0, loaded.stdout
    # 2.21 tells only of tables that are older than its own.
    tables = re.findall(r"Loaded net plugin Bagua-Net \(v(\d+)\)", loaded.stdout) or ["8"]
    assert tables[0] == str(BUILDS[version].table)
    assert loaded.stdout.splitlines().count(OURS) == 3
    passed(run("traffic"))
