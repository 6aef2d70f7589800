"""``bagua doctor`` on GPUs: one line where there is none; else driver, compiler, NCCL and the built parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata

from bagua.cli.checks import machine
from bagua.cli.checks.machine import OK, WARN, Finding
from bagua.csrc import BuildError, build, build_cuda, build_plugin

PROBE_DEADLINE_S = 30.0
NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
BUILT_AT_FIRST_USE = "Nothing to do: the first run that needs it builds it."
# Names of libraries come as arguments. 0 is CUDA_SUCCESS and ncclSuccess.
_PROBE = """
import ctypes, json, sys
found = {"driver": "", "gpus": [], "archs": [], "nccl": "", "nccl_path": "", "problem": ""}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    number, name = ctypes.c_int(), ctypes.create_string_buffer(128)
    cuda.cuDriverGetVersion(ctypes.byref(number))
    found["driver"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
    code = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(number))
    if code:
        found["problem"] = f"the driver answers with error {code}"
    for index in range(0 if code else number.value):
        cuda.cuDeviceGetName(name, 128, index)
        found["gpus"].append(name.value.decode())
        found["archs"].append([])
        for attribute in (75, 76):  # compute capability: major, minor
            cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, index)
            found["archs"][-1].append(number.value)
except OSError:
    pass
for path in sys.argv[1:]:
    try:
        version = ctypes.c_int()
        if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(version)) == 0:
            code = version.value
            found["nccl"] = f"{code // 10000}.{code % 10000 // 100}.{code % 100}"
            found["nccl_path"] = path
            break
    except (OSError, AttributeError):
        pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Probe:
    """``driver``: CUDA version of the driver, "" if there is none; ``gpus``: their names; ``archs``: their
    architectures, [8, 0] and so on; ``nccl``: its version, "" if it can't be opened; ``problem``: what the driver
    said."""

    driver: str = ""
    gpus: list[str] = field(default_factory=list)
    archs: list[list[int]] = field(default_factory=list)
    nccl: str = ""
    nccl_path: str = ""
    problem: str = ""


def _nccl_libraries() -> list[str]:
    """Lists places where NCCL may be: pip's wheels, which torch uses, then the system's."""
    found = []
    for wheel in NCCL_WHEELS:
        try:
            files = metadata.files(wheel) or []
        except metadata.PackageNotFoundError:
            continue
        found += [str(file.locate()) for file in files if file.name == "libnccl.so.2"]
    return [*found, "libnccl.so.2"]


def probe() -> Probe:
    """Asks driver and NCCL. Raises nothing."""
    arguments = ["-c", _PROBE, *_nccl_libraries()]
    return machine.ask(arguments, Probe, PROBE_DEADLINE_S, "the driver", "asking the driver")


def findings() -> list[Finding]:
    """Makes all lines about GPUs; one line if there is none."""
    found = probe()
    if not found.driver and not found.problem:
        nvcc = build_cuda.find_nvcc()
        kernels = f"nvcc {nvcc.release} could compile kernels" if nvcc else "no nvcc, no driver"
        return [Finding("GPU", OK, f"none here: everything runs on the CPU ({kernels})")]
    return [_driver(found), _nvcc(), _nccl(found), _leg(), _kernels(found), _plugin()]


def _driver(found: Probe) -> Finding:
    version = f"driver for CUDA {found.driver}" if found.driver else "no driver"
    if found.problem or not found.gpus:
        detail = f"{version}, no GPU seen: {found.problem or 'it counts none'}"
        return Finding("GPU", WARN, detail, "nvidia-smi must list it (docker run --gpus all); CUDA_VISIBLE_DEVICES?")
    return Finding("GPU", OK, f"{', '.join(found.gpus)}; {version}")


def _nvcc() -> Finding:
    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        fix = "Install the CUDA toolkit, or set CUDA_HOME; without it codecs do not run on the GPU."
        return Finding("nvcc", WARN, "not found", fix)
    return Finding("nvcc", OK, f"{nvcc.release} ({nvcc.path})")


def _nccl(found: Probe) -> Finding:
    if not found.nccl:
        fix = "pip install nvidia-nccl-cu13 (or -cu12), or a torch that is built for CUDA"
        return Finding("NCCL", WARN, "not found: GPUs would exchange through the CPU's memory", fix)
    return Finding("NCCL", OK, f"{found.nccl} ({found.nccl_path})")


def _leg() -> Finding:
    try:
        path = build.core_path(extension=build.DEVICE)
    except BuildError as error:
        return Finding("GPU leg", WARN, str(error), "Mend what it says.")
    if path.is_file():
        return Finding("GPU leg", OK, str(path))
    return Finding("GPU leg", WARN, "not built yet", BUILT_AT_FIRST_USE)


def _kernels(found: Probe) -> Finding:
    newest = tuple(max(found.archs, default=build_cuda.OLDEST_ARCH))
    if newest < build_cuda.OLDEST_ARCH:
        detail = f"for architecture 8.0 and newer, and this is {newest[0]}.{newest[1]}"
        return Finding("GPU kernels", OK, f"{detail}: codecs run in the daemons, on the CPU")
    nvcc = build_cuda.find_nvcc()
    # Within one major version a driver runs what any nvcc compiles.
    if nvcc and found.driver and int(nvcc.release.split(".")[0]) > int(found.driver.split(".")[0]):
        detail = f"nvcc {nvcc.release} is newer than the driver's CUDA {found.driver}: what it compiles can't run"
        fix = f"Install an nvcc of CUDA {found.driver} and set CUDA_HOME; until then codecs run on the CPU."
        return Finding("GPU kernels", WARN, detail, fix)
    try:
        path = build_cuda.kernels_built()
    except BuildError as error:
        return Finding("GPU kernels", WARN, "can't be built", str(error))
    if path is None:
        return Finding("GPU kernels", WARN, "not built yet", BUILT_AT_FIRST_USE)
    return Finding("GPU kernels", OK, str(path))


def _plugin() -> Finding:
    path = build_plugin.find_net_plugin()
    if path is None:
        return Finding("Bagua-Net", WARN, "not built yet", "`bagua net path` builds it, for any program with NCCL.")
    return Finding("Bagua-Net", OK, str(path))
