"""Builds and runs native test programs: plain, under ASan + UBSan, and under TSan.

Objects are kept by the hash of what they are made from in ``$BAGUA_CACHE_DIR/native-tests`` (without the variable, in
pytest's cache), so that a second run compiles only what changed, and units of several programs are compiled once. The
folders of tests/native are no packages: who needs this puts tests/native on ``sys.path``.
"""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bagua.csrc.build import JOINED

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
CORE = CSRC / "core"
INCLUDES = [f"-I{CORE}", f"-I{CSRC}"]
COMPILER = os.environ.get("CXX", "g++")
COMMON = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread"]
# BAGUA_CORE_MARCH hides what this machine's processor has and others have not, as it does for the core.
PROCESSOR = [f"-march={os.environ.get('BAGUA_CORE_MARCH') or 'native'}"]
# The plain build has the flags of the real one; those for TSan and "portable" are without the processor's extensions,
# so that the portable paths are tested too. gcc's warnings about uninitialised values are not reliable below -O2 and
# in instrumented code. -Og and line numbers alone take half the time of -O1 and whole debugging information to compile.
SANITIZED = ["-Og", "-g1", "-fno-omit-frame-pointer", "-Wno-maybe-uninitialized"]
BUILDS = {
    "plain": ["-O3", "-g", *PROCESSOR],
    # The check of vptr opens a pipe: a test that takes all descriptors fails it.
    "asan": [*SANITIZED, *PROCESSOR, "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"],
    "tsan": [*SANITIZED, "-fsanitize=thread", "-Wno-tsan"],
    "portable": ["-O1", "-g1"],
}
LEAN = {"plain": [], "asan": ["-fno-sanitize=null,alignment,object-size,pointer-overflow"], "tsan": []}
"""Flags without --full: a look at every pointer takes nearly half of the compiler's time. ASan looks, too."""
ADDR_NO_RANDOMIZE = 0x0040000
INCLUDE = re.compile(r'^#include ["<]([^">]+)[">]', re.MULTILINE)


def core_sources():
    """The units of the core without its bindings."""
    return [path for path in sorted(CORE.rglob("*.cpp")) if CORE / "bindings" not in path.parents]  # they need Python


def joined(sources, folder):
    """The compiler's input: folders of the core that csrc/build.py joins are one unit each here, too."""
    result = list(sources)
    for names in JOINED:
        units = [unit for unit in result if any(CSRC / name in unit.parents for name in names)]
        result = [*join(units, folder), *(unit for unit in result if unit not in units)]  # the longest first
    return result


def join(sources, folder):
    """One unit of them all, which is none of no sources. Names without linkage must differ between them. Otherwise the
    compiler needs more than half of its time to read the same headers again for every file."""
    if len(sources) < 2:
        return sources
    text = "".join(f'#include "{source}"\n' for source in sources)
    path = folder / f"joined-{content_key([], text)}.cpp"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Threads of one process come here at once.
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as part:
            part.write(text)
        Path(part.name).rename(path)
    return [path]


APART = {"gpu/leg": [{"host_collectives"}, {"communicator_open", "operation", "staged_route"}], "nccl_net": [{"send"}]}
"""Files of these folders that can't be one unit with the others, since names without linkage are the same."""


def groups_of(folder):
    """The C++ files of a folder of APART that do not need Python, as groups of which each can be one unit."""
    left = [path for path in sorted((CSRC / folder).rglob("*.cpp")) if not path.stem.endswith("module")]
    groups = []
    for names in APART[folder]:
        groups.append([path for path in left if path.stem in names])
        left = [path for path in left if path.stem not in names]
    return [left, *groups]


@functools.cache
def compiler_version():
    """First lines of ``g++ --version`` and of what ``-march=native`` means here: both belong to an object's key."""
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    native = subprocess.run(
        [COMPILER, "-march=native", "-Q", "--help=target"], capture_output=True, text=True, check=False
    ).stdout
    return version + native


def with_headers(source, flags=INCLUDES):
    """A file and all of our headers that it includes, directly or not."""
    found = {source: None}  # in order of discovery
    folders = [Path(flag[2:]) for flag in flags if flag.startswith("-I")]
    todo = [source]
    while todo:
        file = todo.pop()
        for name in INCLUDE.findall(file.read_text()):
            places = (folder / name for folder in (file.parent, *folders))  # as the compiler looks
            header = next((path for path in places if path.exists()), None)
            if header is not None and header not in found:
                found[header] = None
                todo.append(header)
    return list(found)


def content_key(paths, *extra):
    """Hash of the files' contents and of the given strings."""
    digest = hashlib.sha256("\0".join(extra).encode())
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


@contextmanager
def locked(folder, name):
    """Holds the folder's lock for builds of this name: two runs at once do not write the same objects."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run_compiler(arguments, output):
    """Runs the compiler into a temporary file and renames it, so that a killed compiler leaves no half object.

    Raises:
        RuntimeError: the compiler's messages.
    """
    part = output.with_suffix(f".{os.getpid()}-{threading.get_ident()}.part")
    result = subprocess.run([COMPILER, *arguments, "-o", str(part)], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(arguments)}\n{result.stderr}")
    part.rename(output)


def build(name, folder, sources, *more, link=()):
    """Compiles and links one build of a test program, with ``more`` flags; returns the program. ``link``: more
    arguments of the linker, such as "-shared" for a library.

    Raises:
        RuntimeError: the messages of every unit that does not compile, or of the linker.
    """
    flags = [*COMMON, *BUILDS[name], *more, *INCLUDES, f"-I{HERE}"]

    def compile_unit(source):
        key = content_key(with_headers(source, flags), compiler_version(), *flags, str(source))
        output = folder / f"{name}-{source.stem}-{key}.o"
        if not output.exists():
            language = ["-x", "c++"] if source.suffix == ".cu" else []
            run_compiler([*flags, *language, "-c", str(source)], output)
        return output

    with locked(folder, f"{name}-{content_key([], *map(str, sources))}"):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            futures = [pool.submit(compile_unit, source) for source in joined(sources, folder)]
        errors = [str(error) for error in (future.exception() for future in futures) if error is not None]
        if errors:
            raise RuntimeError("\n".join(errors))
        objects = [str(future.result()) for future in futures]
        program = folder / f"{name}-{content_key([], *objects, *link)}.program"
        if not program.exists():
            run_compiler([*flags, *objects, *link], program)
    return program


def no_address_randomization():
    """TSan of gcc 12 does not know the address layout of kernels with more than 28 random bits."""
    ctypes.CDLL(None).personality(ADDR_NO_RANDOMIZE)


def run(name, program, arguments, **variables):
    """Runs tests; a sanitizer's report makes the exit status 66 (TSan) or 1."""
    env = {
        "ASAN_OPTIONS": "detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "TSAN_OPTIONS": "halt_on_error=0:second_deadlock_stack=1:die_after_fork=0",  # a forked rank has a thread
    }
    return subprocess.run(
        [str(program), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env, **variables},
        preexec_fn=no_address_randomization if name == "tsan" else None,
        timeout=900,
        check=False,
    )


def check(name, make, *arguments, **variables):
    """Runs tests of the program that ``make()`` builds, with these variables. Fails with their output."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no C++ compiler: '{COMPILER}' is not in PATH")
    result = run(name, make(), arguments, **variables)
    assert result.returncode == 0, f"exit status {result.returncode}\n{result.stdout}"


def cache_folder():
    """Where objects are kept."""
    given = os.environ.get("BAGUA_CACHE_DIR")
    return (Path(given) if given else HERE.parents[1] / ".pytest_cache" / "d") / "native-tests"
