"""Bagua-Net in NVIDIA's own NCCL 2.28.9, without a GPU: NCCL finds it, loads it, and its proxies send over it.

The program real_nccl plays the GPUs. It knows where things lie in that one binary, for x86-64, so it takes no other.
The library is looked for in $BAGUA_TEST_NCCL (``deploy/dev.py test`` sets it), then among NVIDIA's wheels. By hand:
``BAGUA_TEST_NCCL=.../nvidia/nccl pytest tests/native/nccl_net/test_real_nccl.py``.
"""

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bagua import csrc
from bagua.base import net_plugin

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import native_build as native  # noqa: E402

SHA256 = "1c8618b866734cbdd5401715d6178be763ece283b7f808ecf86dedab211162c1"
LIBRARY = "lib/libnccl.so.2"
OURS = "network Bagua-Net, version 11"
SOCKETS = {"NCCL_NET_PLUGIN": "none", "NCCL_NET": "Socket"}
PROGRAM_S = 120

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def installed() -> list[Path]:
    """NCCL's folders in NVIDIA's wheels of this environment."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    return [root / "nccl" for root in roots if (root / "nccl" / LIBRARY).is_file()]


def unfit(library: Path) -> str | None:
    """Why this library is not the one."""
    if not library.is_file():
        return f"there is no {library}"
    with library.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return None if found == SHA256 else f"{library} is another build: its SHA-256 is {found}"


@pytest.fixture(scope="module")
def nccl() -> Path:
    """libnccl.so.2 of the wheel nvidia-nccl-cu13 2.28.9 for x86-64."""
    if platform.machine() != "x86_64":
        pytest.skip(f"real NCCL: the layouts are those of the build for x86-64; this is {platform.machine()}")
    given = os.environ.get("BAGUA_TEST_NCCL")
    if given:  # what was promised must not be skipped
        reason = unfit(Path(given) / LIBRARY)
        assert reason is None, f"BAGUA_TEST_NCCL: {reason}"
        return Path(given) / LIBRARY
    reasons = []
    for folder in installed():
        reason = unfit(folder / LIBRARY)
        if reason is None:
            return folder / LIBRARY
        reasons.append(reason)
    found = "; ".join(reasons) or "BAGUA_TEST_NCCL is not set, and no wheel has it"
    pytest.skip(f"real NCCL: needs nvidia-nccl-cu13 2.28.9: {found}")


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, nccl: Path) -> Run:
    """``run("traffic", **environment)``: the program's result. Without an environment NCCL gets what ranks get."""
    if shutil.which(native.COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{native.COMPILER}' is not in PATH")
    cache = request.config.cache
    assert cache is not None
    folder = native.cache_folder(Path(cache.mkdir("native-tests")))
    program = native.build("plain", folder, sorted((HERE / "real_nccl").glob("*.cpp")))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "BAGUA_NET_"))}
    clean["NCCL_SOCKET_IFNAME"] = "lo"

    def start(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        ranks = net_plugin.variables(csrc.net_plugin(), clean)
        return subprocess.run(
            [str(program), str(nccl), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**clean, **ranks, **environment},
            timeout=PROGRAM_S,
            check=False,
        )

    return start


def passed(result: "subprocess.CompletedProcess[str]", network: str) -> list[str]:
    """The lines of a program that found nothing wrong, and what it sent over."""
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"
    lines = result.stdout.splitlines()
    assert lines[0].startswith(network), result.stdout
    assert lines[-1] == "0 errors", result.stdout
    return lines


def test_every_communicator_gets_the_plugin(run: Run) -> None:
    lines = passed(run("load"), OURS)
    assert lines[:-1] == [OURS] * 3


def test_without_its_variable_the_second_communicator_fails(run: Run) -> None:
    """NVIDIA/nccl#1978: why net_plugin.variables() has NCCL_NET_PLUGIN_REF_COUNT."""
    result = run("load", NCCL_NET_PLUGIN_REF_COUNT="0")
    assert result.returncode == 1, result.stdout
    assert result.stdout.splitlines()[0] == OURS
    assert "ncclNetInit: error" in result.stdout


@pytest.mark.parametrize("helpers", ["0", "2"])
def test_traffic(run: Run, helpers: str) -> None:
    lines = passed(run("traffic", BAGUA_NET_THREADS=helpers), OURS)
    assert sum("slices wrong" in line for line in lines) == 20


def test_one_wrong_bit_is_found(run: Run) -> None:
    """The driver can fail: a bit of each operation is sent otherwise than expected."""
    result = run("traffic", "spoil")
    found = re.findall(r"^(?:LL|Simple): (\d+) of \d+ slices wrong$", result.stdout, re.MULTILINE)
    assert (result.returncode, found) == (1, ["1"] * 20), result.stdout


@pytest.mark.parametrize("helpers", ["0", "2"])
def test_given_back_while_requests_are_pending(run: Run, helpers: str) -> None:
    passed(run("free", BAGUA_NET_THREADS=helpers), OURS)


@pytest.mark.parametrize("mode", ["load", "traffic", "free"])
def test_sockets_of_nccl(run: Run, mode: str) -> None:
    """The driver is right: NCCL's own network passes, too."""
    passed(run(mode, **SOCKETS), "network Socket, ")
