"""Builds the native core once per machine and loads it.

A built core lies in ``<cache>/core/<key>/``; the key names everything that the result depends on, so an upgrade of
torch or of the sources builds anew and never disturbs a running job. Loading a built core does not import torch.
Building happens in a process of its own (this file, run as a script), under an operating-system lock that vanishes with
its holder: torch's own lock file survives a killed builder and would block later ones for ever, so every build gets a
fresh folder.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE_NAME = "bagua_core_native"
SOURCE_DIR = Path(__file__).resolve().parent
COMPILE_FLAGS = ("-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra")
# Nothing of torch is used, and the library must load without it. libstdc++ is named first because torch exports copies
# of its templates, which would make the linker take torch as needed.
LINK_FLAGS = ("-Wl,--as-needed", "-lstdc++", "-pthread")
BUILT_APART = ("tools", "device", "cuda", "nccl_net")
"""Folders that are no part of the core: programs, the GPU leg, its kernels, the network plugin."""
_TAIL_LINES = 30


class BuildError(RuntimeError):
    """The native core could not be built or loaded. The message says why and what to do."""


def default_cache_dir() -> Path:
    """The same as ``bagua.base.paths.cache_dir``: BAGUA_CACHE_DIR, else $XDG_CACHE_HOME/bagua, else ~/.cache/bagua."""
    explicit = os.environ.get("BAGUA_CACHE_DIR")
    return Path(explicit) if explicit else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bagua"


def _sources() -> list[Path]:
    """All files that the core is compiled from, sorted: all but what is built by itself."""
    found = (path for suffix in ("*.cpp", "*.h") for path in SOURCE_DIR.rglob(suffix))
    return sorted(path for path in found if path.relative_to(SOURCE_DIR).parts[0] not in BUILT_APART)


def march() -> str:
    """Value of ``-march``: this machine's, unless ``BAGUA_CORE_MARCH`` says otherwise (empty: no flag)."""
    return os.environ.get("BAGUA_CORE_MARCH", "native")


def _compile_flags() -> list[str]:
    processor = march()
    return [*COMPILE_FLAGS, *([f"-march={processor}"] if processor else [])]


def torch_version() -> str:
    """Version of the installed torch, without importing it. Raises BuildError if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError("PyTorch is not installed in this environment. Install it: pip install torch") from error


def _cuda_version() -> str:
    """CUDA version that the installed torch was built for, "cpu" if for none; read from its files."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        try:
            text = (Path(folder) / "version.py").read_text()
        except OSError:
            continue
        found = re.search(r"^cuda\b[^=]*=\s*'([^']+)'", text, re.MULTILINE)
        return found.group(1) if found else "cpu"
    return "cpu"


def cpu_flags() -> str:
    """What the processor can do: a home folder may be shared by unlike machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(lines)))


@functools.cache
def _sources_digest(stamp: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in stamp:
        digest.update(name.encode() + b"\0" + (SOURCE_DIR / name).read_bytes() + b"\0")
    return digest.hexdigest()


def core_key() -> str:
    """Names the core that fits the sources, flags, torch, CUDA, Python and processor of now. Raises BuildError."""
    stamp = tuple((str(p.relative_to(SOURCE_DIR)), p.stat().st_mtime_ns, p.stat().st_size) for p in _sources())
    parts = [
        _sources_digest(stamp),
        " ".join([*_compile_flags(), *LINK_FLAGS]),
        torch_version(),
        _cuda_version(),
        sysconfig.get_config_var("SOABI") or sys.version,
        platform.machine(),
        cpu_flags() if march() == "native" else "",
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def core_path(cache_dir: Path | None = None) -> Path:
    """Where the fitting core lies, or would. Raises BuildError if torch is missing."""
    return (cache_dir or default_cache_dir()) / "core" / core_key() / f"{MODULE_NAME}.so"


def is_built(cache_dir: Path | None = None) -> bool:
    """True if ``load()`` would not have to build. Raises BuildError if torch is missing."""
    return core_path(cache_dir).is_file()


def describe(cache_dir: Path | None = None) -> dict[str, str]:
    """What the build depends on, for ``bagua doctor``; "" for what is missing. Raises nothing."""
    compiler = os.environ.get("CXX", "c++")
    found = {"compiler": shutil.which(compiler) or shutil.which("g++") or "", "ninja": _ninja() or ""}
    found["march"] = march()
    try:
        found["torch"] = torch_version()
        found["cuda"] = _cuda_version()
        found["path"] = str(core_path(cache_dir))
        found["built"] = "yes" if is_built(cache_dir) else ""
    except (BuildError, OSError) as error:
        found.update(torch="", cuda="", path="", built="", problem=str(error))
    return found


def _ninja() -> str | None:
    """The ninja program: on the PATH, or beside this Python (an environment that is not activated)."""
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def build(cache_dir: Path | None = None) -> Path:
    """Makes sure that the fitting core is built; returns its path. Builds at most once, whoever asks at the same time.

    Raises BuildError with the compiler's last lines, or with what is missing and how to get it.
    """
    target = core_path(cache_dir)
    if target.is_file():
        return target
    _check_tools()
    command = [sys.executable, "-P", str(SOURCE_DIR / "build.py"), str(target)]
    try:
        target.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise BuildError(
            f"The native core can't be built in {target.parent}: {error.strerror}. Choose another folder with "
            "BAGUA_CACHE_DIR."
        ) from error
    if result.returncode == 0 and target.is_file():
        return target
    lines = result.stdout.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    raise BuildError(
        f"Building the native core failed (exit code {result.returncode}). The last lines were:\n"
        + "\n".join(f"    {line}" for line in lines)
        + "\n`bagua doctor` checks compiler, ninja and torch."
    )


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        raise BuildError(
            f"No C++ compiler: {compiler!r} was not found. Install one (Debian, Ubuntu: apt-get install g++; Fedora: "
            "dnf install gcc-c++), or name it with CXX."
        )
    if _ninja() is None:
        raise BuildError("ninja was not found. Install it: pip install ninja")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the operating system's lock on ``path``; it goes when this process goes, however that ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _build_locked(target: Path) -> None:
    """Builds ``target`` unless another process just has. Runs in the builder's own process; imports torch."""
    root, key = target.parent.parent, target.parent.name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(root / f"{key}.lock"):
        if target.is_file():
            return
        for left_over in root.glob(f"{key}.build-*"):  # of a builder that was killed: we hold its lock now
            shutil.rmtree(left_over, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{key}.build-", dir=root))
        try:
            _compile(folder)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(folder / f"{MODULE_NAME}.so", target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _compile(folder: Path) -> None:
    ninja = _ninja()
    if ninja is not None:  # torch looks for it on the PATH only
        os.environ["PATH"] = f"{Path(ninja).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    from torch.utils import cpp_extension

    cpp_extension.load(
        name=MODULE_NAME,
        sources=[str(path) for path in _sources() if path.suffix == ".cpp"],
        extra_include_paths=[str(SOURCE_DIR)],
        extra_cflags=_compile_flags(),
        extra_ldflags=list(LINK_FLAGS),
        build_directory=str(folder),
        is_python_module=False,
    )


@functools.cache
def _load(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE_NAME, str(path))
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path, loader=loader)
    if spec is None:
        raise BuildError(f"{path} is no Python extension")
    try:
        module: ModuleType = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"The native core {path} can't be loaded: {error}. Remove that folder; it is built again at the next start."
        ) from error
    return module


def load(cache_dir: Path | None = None) -> Any:
    """The module ``bagua_core_native`` (typed by core.pyi), built first if need be (about a minute on two cores).

    One module per process. Raises BuildError.
    """
    return _load(_first_path(cache_dir))


@functools.cache
def _first_path(cache_dir: Path | None) -> Path:
    """The path that this process uses from now on, though sources or environment change later."""
    return build(cache_dir)


def _main(arguments: list[str]) -> int:
    """Builds the given target; without one (``python -m bagua.csrc.build``) what is missing, and prints its path."""
    try:
        if arguments:
            _build_locked(Path(arguments[0]))
        else:
            print(build())
    except (RuntimeError, OSError, ImportError) as error:  # torch raises RuntimeError with the compiler's output
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
