"""Builds the native Python modules once per machine and loads them: the core, and the GPU leg beside it.

Loading a built module does not import torch. Building happens in a process of its own (this file, run as a script):
torch brings pybind11 and the builder. What is kept where: see build_cache.py; what need not be built: prebuilt.py.
A build that was killed goes on where it was: ninja's log tells it which objects are complete.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from bagua.csrc import build_cache, prebuilt, wire_version
from bagua.csrc.build_cache import BuildError, march
from bagua.csrc.build_progress import Progress, told

SOURCE_DIR = Path(__file__).resolve().parent
COMPILE_FLAGS = ("-std=c++17", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra")
# Nothing of torch is used, and the library must load without it. libstdc++ is named first because torch exports copies
# of its templates, which would make the linker take torch as needed.
LINK_FLAGS = ("-Wl,--as-needed", "-lstdc++", "-pthread")
# Folders that are compiled together as one unit, the longest first, and how far their code is optimised where -O3 is in
# vain: they decide, wait and call what computes. Most of the compiler's time went into the same headers of the standard
# library and of pybind11, again for every file, and into code that runs once for each operation. Not codec and kernel,
# which compute, and not net, where headers of two of the system's families would meet.
JOINED = {
    ("core/engine", "core/transport"): "O1",
    ("core/bindings",): "O1",
    ("core/channel", "core/collective"): "O1",
    ("core/base",): "",
    ("c10d",): "",
}


@dataclass(frozen=True)
class Extension:
    """A Python module made of the C++ in ``folder``. ``headers``: folders of which it takes headers alone."""

    kind: str
    module: str
    what: str
    folder: str
    headers: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = LINK_FLAGS
    compile_flags: tuple[str, ...] = COMPILE_FLAGS
    needs_no_torch: bool = True  # when it is loaded: one build serves all versions of torch


CORE = Extension("core", "bagua_core_native", "native core", "core")
# Of the kernels it takes kernels.h alone: no nvcc is needed.
DEVICE = Extension(
    "device",
    "bagua_device_native",
    "GPU leg",
    "gpu/leg",
    ("gpu/kernels", "core/base", "core/channel", "core/codec", "core/kernel"),
    (*LINK_FLAGS, "-ldl"),
)
# The one that sees types of torch, whose headers take most of the compiler's time. torch names the standard of C++.
C10D = Extension(
    "c10d",
    "bagua_c10d_native",
    "backend of torch.distributed",
    "c10d",
    ("core/base", "core/channel", "core/kernel"),
    LINK_FLAGS,
    ("-O1", "-fvisibility=hidden", "-Wall", "-Wextra"),
    needs_no_torch=False,
)
EXTENSIONS = {extension.kind: extension for extension in (CORE, DEVICE, C10D)}


def _sources(extension: Extension = CORE) -> list[Path]:
    """Lists all files that the module is made of, sorted."""
    headers = build_cache.files_of(SOURCE_DIR, extension.headers, (".h",))
    return sorted([*_units(extension), *build_cache.files_of(SOURCE_DIR, (extension.folder,), (".h",)), *headers])


def _units(extension: Extension) -> list[Path]:
    """The units that are compiled."""
    return build_cache.files_of(SOURCE_DIR, (extension.folder,), (".cpp",))


def _joined(extension: Extension, folder: Path) -> list[Path]:
    """The compiler's input: files of ``folder`` that include those of JOINED, and the other units by themselves."""
    joined, alone = _joined_texts(extension)
    for name, text in joined.items():
        file = folder / name
        if not file.is_file() or file.read_text() != text:  # ninja goes by its time
            file.write_text(text)
    return [*(folder / name for name in joined), *alone]


def _joined_texts(extension: Extension) -> tuple[dict[str, str], list[Path]]:
    """Files that include others, by name, and the units that no file includes."""
    alone = _units(extension)
    joined = {}
    for names, optimised in JOINED.items():
        units = [unit for unit in alone if any(SOURCE_DIR / name in unit.parents for name in names)]
        if not units:
            continue
        alone = [unit for unit in alone if unit not in units]
        lines = [f'#pragma GCC optimize("{optimised}")'] if optimised else []
        lines += [f'#include "{unit.relative_to(SOURCE_DIR).as_posix()}"' for unit in units]
        joined[f"joined_{'_'.join(Path(name).name for name in names)}.cpp"] = "\n".join(lines) + "\n"
    return joined, alone


def progress(kind: str = CORE.kind, cache_dir: Path | None = None) -> Progress:
    """Returns how far the build of that module is, in whichever process. Raises BuildError if torch is missing."""
    extension = EXTENSIONS[kind]
    total = sum(map(len, _joined_texts(extension)))
    return Progress(extension.what, build_cache.building_folder(core_path(cache_dir, extension)), total)


def _compile_flags(extension: Extension = CORE) -> list[str]:
    return [*extension.compile_flags, *build_cache.march_flags()]


def torch_version() -> str:
    """Version of the installed torch, without importing it. Raises BuildError if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise BuildError(
            "PyTorch is not installed in this environment. Install it: pip install torch [BG202]"
        ) from error


def _of_torch(file: str) -> bytes:
    """A file of the installed torch, empty if there is none."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = next((Path(folder) / file for folder in folders if (Path(folder) / file).is_file()), None)
    return found.read_bytes() if found else b""


def _cuda_version() -> str:
    """CUDA version that the installed torch was built for, "cpu" if for none; read from its files."""
    found = re.search(rb"^cuda\b[^=]*=\s*'([^']+)'", _of_torch("version.py"), re.MULTILINE)
    return found.group(1).decode() if found else "cpu"


def core_key(extension: Extension = CORE) -> str:
    """Names the module that fits the sources, flags, torch, CUDA, Python and processor of now. Raises BuildError."""
    return build_cache.key(
        [
            build_cache.digest(SOURCE_DIR, _sources(extension)),
            " ".join([*_compile_flags(extension), *extension.link_flags, str(JOINED)]),
            torch_version(),
            _cuda_version(),
            sysconfig.get_config_var("SOABI") or sys.version,
            *build_cache.processor_parts(),
        ]
    )


def prebuilt_key(extension: Extension = CORE) -> str:
    """Names the module that fits the sources, flags and Python, whatever the processor, and whatever the torch if
    it needs none. Raises BuildError if torch is needed and missing."""
    parts = [
        build_cache.digest(SOURCE_DIR, _sources(extension)),
        " ".join([*extension.compile_flags, *extension.link_flags, str(JOINED)]),
        sysconfig.get_config_var("SOABI") or sys.version,
    ]
    # Builds of one version of torch, for a CUDA or none, have the same C++ interface; wheels until 2.6 have the older
    # std::string.
    if not extension.needs_no_torch:
        parts += [torch_version().partition("+")[0], str(b"7__cxx1112basic_string" in _of_torch("lib/libc10.so"))]
    return build_cache.key(parts)


def core_path(cache_dir: Path | None = None, extension: Extension = CORE) -> Path:
    """Returns the path where the fitting module lies, or would. Raises BuildError if it would have to be built and
    torch is missing.
    """
    found = prebuilt.find(extension.kind, prebuilt_key(extension))
    return found or build_cache.place(extension.kind, core_key(extension), f"{extension.module}.so", cache_dir)


def is_built(cache_dir: Path | None = None) -> bool:
    """True if ``load()`` would not have to build. Raises BuildError if torch is missing."""
    return core_path(cache_dir).is_file()


def built() -> list[Path]:
    """Modules that fit and lie in the cache. Raises BuildError if torch is missing."""
    places = (build_cache.place(one.kind, core_key(one), f"{one.module}.so", None) for one in EXTENSIONS.values())
    return [path for path in places if path.is_file()]


def describe(cache_dir: Path | None = None) -> dict[str, str]:
    """Versions that the build depends on, and the paths of the modules that are built (``built core``), for ``bagua
    doctor``; "" for those that are missing. Raises nothing."""
    compiler = os.environ.get("CXX", "c++")
    found = {"compiler": shutil.which(compiler) or shutil.which("g++") or "", "ninja": _ninja() or ""}
    found["march"] = march()
    try:
        found["torch"] = torch_version()
        found["cuda"] = _cuda_version()
        for extension in (CORE, C10D):
            path = core_path(cache_dir, extension)
            found[f"built {extension.kind}"] = str(path) if path.is_file() else ""
    except (BuildError, OSError) as error:
        found.update({"torch": "", "cuda": "", "built core": "", "built c10d": "", "problem": str(error)})
    return found


def _ninja() -> str | None:
    """The ninja program: on the PATH, or beside this Python (an environment that is not activated)."""
    return shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))


def python_header() -> Path:
    """Returns where Python.h of this interpreter lies, or should: Debian has it in a package of its own."""
    return Path(sysconfig.get_path("include")) / "Python.h"


def build(cache_dir: Path | None = None, extension: Extension = CORE) -> Path:
    """Makes sure that the fitting module is built; returns its path. Builds at most once, whoever asks at once.

    Raises BuildError with the compiler's last lines, or with what is missing and how to get it.
    """
    target = core_path(cache_dir, extension)
    if target.is_file():
        return target
    build_cache.compiler()
    if not python_header().is_file():
        raise BuildError(
            f"Python's header files were not found: there is no {python_header()}. Install them (Debian, Ubuntu: "
            "apt-get install python3-dev; Fedora: dnf install python3-devel). [BG212]"
        )
    if _ninja() is None:
        raise BuildError("ninja was not found. Install it: pip install ninja [BG202]")
    # -P: no module of this folder hides another
    command = [sys.executable, "-P", str(SOURCE_DIR / "build.py"), extension.kind, str(target)]
    try:
        # A user who may write there chooses the code that processes of this user load.
        target.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        result = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise build_cache.unwritable(extension.what, target, error) from error
    if result.returncode == 0 and target.is_file():
        return target
    raise BuildError(
        f"Building the {extension.what} failed (exit code {result.returncode}). The last lines were:\n"
        + build_cache.last_lines(result.stdout.decode(errors="replace"))
        + "\n`bagua doctor` checks compiler, ninja and torch. [BG204]"
    )


def _compile(extension: Extension, folder: Path) -> None:
    """Compiles into ``folder``. Runs in the builder's own process; imports torch."""
    # ninja inherits standard input, and with it this lock: where a builder was killed alone, its ninja works on.
    descriptor = os.open(folder / "compiling", os.O_RDWR | os.O_CREAT, 0o600)
    os.dup2(descriptor, 0)
    os.close(descriptor)
    fcntl.flock(0, fcntl.LOCK_EX)
    (folder / "lock").unlink(missing_ok=True)  # torch's own, of a builder that was killed: it would wait for ever
    ninja = _ninja()
    if ninja is not None:  # torch looks for it on the PATH only
        os.environ["PATH"] = f"{Path(ninja).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    from torch.utils import cpp_extension

    cpp_extension.load(
        name=extension.module,
        sources=[str(path) for path in _joined(extension, folder)],
        extra_include_paths=[str(path) for path in build_cache.include_dirs(SOURCE_DIR)],
        extra_cflags=_compile_flags(extension),
        extra_ldflags=list(extension.link_flags),
        build_directory=str(folder),
        is_python_module=False,
    )


@functools.cache
def _load(path: Path, extension: Extension = CORE) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(extension.module, str(path))
    spec = importlib.util.spec_from_file_location(extension.module, path, loader=loader)
    if spec is None:
        raise BuildError(f"{path} is no Python extension [BG205]")
    try:
        module: ModuleType = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise BuildError(
            f"The {extension.what} {path} can't be loaded: {error}. Remove that folder; it is built again at the next "
            "start. [BG205]"
        ) from error
    if extension is CORE:
        module.set_wire_version(wire_version.WIRE_VERSION)
    return module


def load(cache_dir: Path | None = None, tells: bool = True) -> Any:
    """The module ``bagua_core_native`` (typed by core.pyi), built first if need be. ``tells``: a build's progress, on
    standard error.

    One module per process. Raises BuildError.
    """
    return _load(_first_path(cache_dir, CORE, tells), CORE)


def load_device(cache_dir: Path | None = None) -> Any:
    """The module ``bagua_device_native`` (typed by gpu/leg/__init__.pyi), built first if need be; CUDA is not needed.

    One module per process. Raises BuildError.
    """
    return _load(_first_path(cache_dir, DEVICE), DEVICE)


def load_c10d(cache_dir: Path | None = None) -> Any:
    """The module ``bagua_c10d_native`` (typed by c10d/__init__.pyi), built first if need be. The process must have
    imported torch.

    One module per process. Raises BuildError.
    """
    return _load(_first_path(cache_dir, C10D), C10D)


_paths: dict[tuple[Path | None, Extension], Path] = {}


def _first_path(cache_dir: Path | None, extension: Extension, tells: bool = True) -> Path:
    """The path that this process uses from now on, though sources or environment change later."""
    key = cache_dir, extension
    if key not in _paths:
        built = core_path(cache_dir, extension).is_file()
        with nullcontext() if built or not tells else told(progress(extension.kind, cache_dir)):
            _paths[key] = build(cache_dir, extension)
    return _paths[key]


def _main(arguments: list[str]) -> int:
    """``KIND TARGET``: builds that target. ``[KIND]`` (``python -m bagua.csrc.build``: the core) builds what is missing
    and prints its path."""
    extension = EXTENSIONS[arguments[0]] if arguments else CORE
    try:
        if len(arguments) > 1:
            build_cache.make_once(Path(arguments[1]), lambda folder: _compile(extension, folder))
        else:
            print(build(extension=extension))
    except (RuntimeError, OSError, ImportError) as error:  # torch raises RuntimeError with the compiler's output
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
