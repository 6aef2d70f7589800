"""Builds the small programs of ``tools/``: one source file each, needed by `bagua bench` alone, no part of the core.

Like the core they are compiled on first use and cached by what they are made from. torch is not needed.
"""

from __future__ import annotations

from pathlib import Path

from bagua.csrc import build_cache

TOOLS_DIR = build_cache.SOURCE_DIR / "tools"
FLAGS = ("-std=c++17", "-O3", "-Wall", "-Wextra", "-pthread")


def build_tool(name: str, cache_dir: Path | None = None) -> Path:
    """The program compiled from ``tools/<name>.cpp``; built at most once, whoever asks at the same time.

    Raises BuildError with the compiler's last lines.
    """
    source = TOOLS_DIR / f"{name}.cpp"
    flags = [*FLAGS, *build_cache.march_flags()]
    key = build_cache.key([source.read_text(), " ".join(flags), *build_cache.processor_parts()])
    target = build_cache.place("tools", key, name, cache_dir)
    try:
        return build_cache.make_once(
            target,
            lambda folder: build_cache.run_compiler(
                [build_cache.compiler(), *flags, str(source), "-o", str(folder / name)]
            ),
        )
    except OSError as error:
        raise build_cache.unwritable(f"program {name}", target, error) from error
