"""Finds native modules that were compiled elsewhere: those of the optional wheel ``bagua-prebuilt``.

That wheel has a module for each level of processors, and a list of them. A module is taken if it was made from the
sources that are installed, by the same Python; so a wheel of another release does no harm. torch and a compiler are
not needed then. BAGUA_CORE_MARCH, whatever its value, has the core compiled here all the same.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
from pathlib import Path

PACKAGE = "bagua_prebuilt"
LIST = "modules.json"
# By machine: values of the compiler's -march, the best first, and the processor's flags that each adds to the next one,
# as in /proc/cpuinfo (there pni is SSE3, and abm is LZCNT).
LEVELS = {
    "x86_64": {
        "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
        "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave",
        "x86-64-v2": "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3",
    },
    "aarch64": {"armv8-a": ""},
}


def find(kind: str, key: str) -> Path | None:
    """The module of that kind with that key (see ``build.prebuilt_key``) for this processor, or None."""
    folder = _folder()
    if folder is None or "BAGUA_CORE_MARCH" in os.environ:  # who sets it wants flags of his own, so it is compiled here
        return None
    made = _made(folder)
    for level in levels(platform.machine(), _flags()):
        name = made.get((kind, level, key))
        if name is not None and (folder / name).is_file():
            return folder / name
    return None


def levels(machine: str, flags: frozenset[str]) -> list[str]:
    """The levels that a processor with these flags can run, the best first."""
    fit: list[str] = []
    # From the lowest on: each level needs the flags of those below.
    for level, added in reversed(LEVELS.get(machine, {}).items()):
        if not flags.issuperset(added.split()):
            break
        fit.insert(0, level)
    return fit


@functools.cache
def _folder() -> Path | None:
    spec = importlib.util.find_spec(PACKAGE)
    places = (spec.submodule_search_locations or []) if spec else []
    return next((Path(place) for place in places if (Path(place) / LIST).is_file()), None)


@functools.cache
def _made(folder: Path) -> dict[tuple[str, str, str], str]:
    try:
        found = json.loads((folder / LIST).read_text())
        return {(one["kind"], one["level"], one["key"]): one["file"] for one in found}
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # then it is compiled


@functools.cache
def _flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(found.partition(":")[2].split())
