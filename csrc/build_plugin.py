"""Builds Bagua-Net (``nccl_net/``), the network plugin of NCCL: plain C++, without torch, Python, CUDA or nccl.h."""

from __future__ import annotations

from pathlib import Path

from bagua.csrc import build_cache
from bagua.csrc.build_cache import SOURCE_DIR, BuildError

LIBRARY = "libnccl-net-bagua.so"
FOLDERS = ("nccl_net", "core/net", "core/base")
# Files of the daemons' transport that the plugin shares.
SHARED = ("core/transport/stream_count.cpp", "core/transport/stream_count.h")
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread")
# The standard library's templates ignore -fvisibility: beside torch's libraries only NCCL's tables may be seen.
EXPORTS = "{ global: ncclNetPlugin_v*; local: *; };"
# Programs of other environments load it: they may bring an older libstdc++ than our compiler's.
LINK_FLAGS = ("-shared", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", "-pthread")


def _sources(suffixes: tuple[str, ...]) -> list[Path]:
    """Source files of the plugin. The compiler reports a shared one that is missing."""
    shared = (SOURCE_DIR / name for name in SHARED)
    found = [path for path in shared if path.suffix in suffixes and path.is_file()]
    return [*build_cache.files_of(SOURCE_DIR, FOLDERS, suffixes), *found]


def _path(cache_dir: Path | None) -> Path:
    files = _sources((".cpp", ".h"))
    parts = [
        build_cache.digest(SOURCE_DIR, files),
        " ".join([*FLAGS, *LINK_FLAGS, EXPORTS, *build_cache.march_flags()]),
        *build_cache.processor_parts(),
    ]
    return build_cache.place("nccl_net", build_cache.key(parts), LIBRARY, cache_dir)


def find_net_plugin(cache_dir: Path | None = None) -> Path | None:
    """Returns the fitting plugin if it is built."""
    target = _path(cache_dir)
    return target if target.is_file() else None


def net_plugin(cache_dir: Path | None = None) -> Path:
    """The plugin for NCCL_NET_PLUGIN, built first if need be, once for all who ask. Raises BuildError."""
    target = _path(cache_dir)
    try:
        return build_cache.make_once(target, _compile)
    except OSError as error:
        raise build_cache.unwritable("network plugin", target, error) from error


def _compile(folder: Path) -> None:
    sources = _sources((".cpp",))
    if not any(path.is_relative_to(SOURCE_DIR / "nccl_net") for path in sources):
        raise BuildError(
            f"There are no sources in {SOURCE_DIR / 'nccl_net'}: the installation is not complete. [BG208]"
        )
    compiler = [build_cache.compiler(), *FLAGS, *build_cache.march_flags(), *build_cache.include_flags(SOURCE_DIR)]
    objects = build_cache.compile_objects(compiler, sources, SOURCE_DIR, folder)
    exports = folder / "exports"
    exports.write_text(EXPORTS)
    script = f"-Wl,--version-script={exports}"
    build_cache.run_compiler([compiler[0], *objects, *LINK_FLAGS, script, "-o", str(folder / LIBRARY)])
