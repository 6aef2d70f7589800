"""Builds the small programs of ``tools/``: one source file each, needed by `bagua bench` alone, no part of the core.

Like the core they are compiled on first use and cached by what they are made from. torch is not needed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from bagua.csrc import build

TOOLS_DIR = build.SOURCE_DIR / "tools"
FLAGS = ("-std=c++17", "-O3", "-Wall", "-Wextra", "-pthread")
COMPILE_DEADLINE_S = 300.0


def _compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if found is None:
        raise build.BuildError(
            "No C++ compiler was found. Install one (Debian, Ubuntu: apt-get install g++), or name it with CXX."
        )
    return found


def build_tool(name: str, cache_dir: Path | None = None) -> Path:
    """The program compiled from ``tools/<name>.cpp``; built at most once, whoever asks at the same time.

    Raises BuildError with the compiler's last lines.
    """
    source = TOOLS_DIR / f"{name}.cpp"
    march = build.march()
    flags = [*FLAGS, *([f"-march={march}"] if march else [])]
    parts = [source.read_text(), " ".join(flags), platform.machine(), build.cpu_flags() if march == "native" else ""]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = (cache_dir or build.default_cache_dir()) / "tools" / f"{name}-{key}"
    if target.is_file():
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with build.locked(target.with_suffix(".lock")):
            if not target.is_file():
                _compile(source, flags, target)
    except OSError as error:
        raise build.BuildError(
            f"The program {name} can't be built in {target.parent}: {error.strerror}. Choose another folder with "
            "BAGUA_CACHE_DIR."
        ) from error
    return target


def _compile(source: Path, flags: list[str], target: Path) -> None:
    """Makes ``target``, all or nothing. We hold its lock."""
    scratch = target.with_suffix(".new")
    command = [_compiler(), *flags, str(source), "-o", str(scratch)]
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
        raise build.BuildError(f"{' '.join(command)} took longer than {COMPILE_DEADLINE_S:.0f} s.") from None
    if done.returncode:
        lines = "\n".join(f"    {line}" for line in done.stdout.strip().splitlines()[-30:])
        raise build.BuildError(
            f"{' '.join(command)} failed (exit code {done.returncode}). The last lines were:\n{lines}"
        )
    os.replace(scratch, target)
