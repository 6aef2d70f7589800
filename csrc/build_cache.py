"""Helpers of all builds of native code: keys, the cache, locks, compilers and their errors.

A build lies in ``<cache>/<kind>/<key>/<file>``; the key names everything that the result depends on, so an
upgrade never disturbs a running job. Each is built at most once, under an operating-system lock that vanishes with its
holder, in ``<key>.build`` beside it. That folder stays until the build is done: a build that was killed goes on there,
with the objects that it had finished.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
COMPILE_DEADLINE_S = 600.0  # of one run of a compiler
_TAIL_LINES = 30


class BuildError(RuntimeError):
    """Native code could not be built or loaded. The message says why and what to do."""


def default_cache_dir() -> Path:
    """The same as ``bagua.base.paths.cache_dir``: BAGUA_CACHE_DIR, else $XDG_CACHE_HOME/bagua, else ~/.cache/bagua."""
    explicit = os.environ.get("BAGUA_CACHE_DIR")
    if explicit:
        return Path(explicit)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bagua"
    except RuntimeError:
        raise BuildError(
            f"HOME is not set, and user {os.getuid()} is not in the system's list of users, so native code has no "
            "place. Set HOME or BAGUA_CACHE_DIR to a folder that this user can write. [BG108]"
        ) from None


def march() -> str:
    """Value of ``-march``: this machine's, unless ``BAGUA_CORE_MARCH`` says otherwise (empty: no flag)."""
    return os.environ.get("BAGUA_CORE_MARCH", "native")


def march_flags() -> list[str]:
    """``-march`` as compilers take it, or nothing."""
    processor = march()
    return [f"-march={processor}"] if processor else []


def processor_parts() -> list[str]:
    """Properties of the processor for a key. A home folder may be shared by unlike machines."""
    return [platform.machine(), _cpu_flags() if march() == "native" else ""]


def _cpu_flags() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    # -march=native tunes for the model, too
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))]
    return "\n".join(sorted(set(lines)))  # the cores of a hybrid processor differ


def compiler() -> str:
    """The C++ compiler: CXX, else c++, else g++. Raises BuildError if there is none."""
    wanted = os.environ.get("CXX", "c++")
    found = shutil.which(wanted) or shutil.which("g++")
    if found is None:
        raise BuildError(
            f"No C++ compiler: {wanted!r} was not found. Install one (Debian, Ubuntu: apt-get install g++; Fedora: "
            "dnf install gcc-c++), or name it with CXX. [BG203]"
        )
    return found


def include_flags(root: Path) -> list[str]:
    """Returns the flags with which sources below ``root`` find headers: the core's by folder ("net/socket.h"), the
    others' by the whole path ("gpu/kernels/kernels.h").
    """
    return [f"-I{folder}" for folder in include_dirs(root)]


def include_dirs(root: Path) -> list[Path]:
    return [root / "core", root]


def files_of(root: Path, folders: Iterable[str], suffixes: Sequence[str]) -> list[Path]:
    """Lists all files below these folders of ``root`` that end so, sorted."""
    found = (path for folder in folders for suffix in suffixes for path in (root / folder).rglob(f"*{suffix}"))
    return sorted(found)


def digest(root: Path, files: Sequence[Path]) -> str:
    """A hash of names and contents. Read once as long as nothing changes on the disk."""
    stamps = ((str(path.relative_to(root)), path.stat()) for path in files)
    return _digest(root, tuple((name, status.st_mtime_ns, status.st_size) for name, status in stamps))


@functools.cache
def _digest(root: Path, stamp: tuple[tuple[str, int, int], ...]) -> str:
    found = hashlib.sha256()
    for name, _, _ in stamp:
        found.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return found.hexdigest()


def key(parts: Iterable[str]) -> str:
    """A short name for all that a result depends on."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def place(kind: str, name: str, file: str, cache_dir: Path | None) -> Path:
    """Returns the path where the result with this key lies, or would. A node's daemon may have one for all users of its
    host, which only root can write (BAGUA_SHARED_CACHE_DIR).
    """
    shared = os.environ.get("BAGUA_SHARED_CACHE_DIR")
    if shared and cache_dir is None and (found := Path(shared) / kind / name / file).is_file():
        return found
    return (cache_dir or default_cache_dir()) / kind / name / file


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the operating system's lock on ``path``; it goes when this process goes, however that ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # The file stays: a lock on a file that was deleted keeps nobody out who makes it again


def building_folder(target: Path) -> Path:
    """Returns the folder where ``target`` is built. Objects of one key alone lie there."""
    return target.parent.with_name(f"{target.parent.name}.build")


def make_once(target: Path, make: Callable[[Path], None], remembered_s: float = 0) -> Path:
    """Makes ``target`` (see ``place``) unless it is there; returns it. ``make`` leaves a file of that name in the
    folder that it is given, which may hold what an earlier try had finished. Raises OSError if the cache can't be
    written, and what ``make`` raises: a BuildError again to all who ask within ``remembered_s``, without another try.
    """
    if target.is_file():
        return target
    root, name = target.parent.parent, target.parent.name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(root / f"{name}.lock"):
        # Another process may have built it while this one waited for the lock.
        if target.is_file():
            return target
        failure = root / f"{name}.failed"
        _raise_remembered(failure, remembered_s)
        folder = building_folder(target)
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            make(folder)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            os.replace(folder / target.name, target)  # whoever sees the name without the lock sees a whole file
            failure.unlink(missing_ok=True)
        except BuildError as error:
            if remembered_s:
                with suppress(OSError):
                    failure.write_text(str(error))
            raise
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".told").unlink(missing_ok=True)
    return target


def _raise_remembered(failure: Path, remembered_s: float) -> None:
    """Raises the BuildError that ``failure`` keeps, unless it is older."""
    with suppress(FileNotFoundError):
        age = time.time() - failure.stat().st_mtime
        if 0 <= age < remembered_s:  # negative: the clock was set back
            again = f"That was {age:.0f} s ago; the next try is after {remembered_s:.0f} s, or once {failure} is gone."
            raise BuildError(f"{failure.read_text()}\n{again}")


def unwritable(what: str, target: Path, error: OSError) -> BuildError:
    """The error for a cache that can't be used."""
    return BuildError(
        f"The {what} can't be built in {target.parent}: {error.strerror}. Choose another folder with BAGUA_CACHE_DIR. "
        "[BG206]"
    )


def last_lines(text: str) -> str:
    """The end of a compiler's output, set in."""
    return "\n".join(f"    {line}" for line in text.strip().splitlines()[-_TAIL_LINES:])


def run_compiler(command: Sequence[str]) -> None:
    """Runs a compiler. Raises BuildError with its last lines, or if it takes too long."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMPILE_DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{' '.join(command)} took longer than {COMPILE_DEADLINE_S:.0f} s. [BG204]") from None
    if done.returncode:
        raise BuildError(
            f"{' '.join(command)} failed (exit code {done.returncode}). The last lines were:\n{last_lines(done.stdout)}"
            " [BG204]"
        )


def compile_objects(command: Sequence[str], sources: Sequence[Path], root: Path, folder: Path) -> list[str]:
    """Compiles those of ``sources``, below ``root``, whose objects are not in ``folder`` yet; returns all objects. An
    object has its name when it is complete. Raises BuildError."""
    objects = [folder / (path.relative_to(root).as_posix().replace("/", "-") + ".o") for path in sources]

    def one(source: Path, target: Path) -> None:
        if not target.is_file():
            part = target.with_suffix(f".{os.getpid()}")  # the compiler of a builder that was killed may still write
            run_compiler([*command, "-c", str(source), "-o", str(part)])
            os.replace(part, target)

    jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        for future in [pool.submit(one, *pair) for pair in zip(sources, objects, strict=True)]:
            future.result()
    return [str(path) for path in objects]
