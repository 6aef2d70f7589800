"""Cases of the contract suite over algorithms: a file for each algorithm, which exports ``CASES``. See case.py."""

import importlib
from pathlib import Path

NO_CASES = {"__init__", "case", "general", "harness", "leaks", "mistakes", "rank_side", "subjects"}


def load_cases():
    """All cases of this folder by name. Raises ValueError if a name is used twice."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem in NO_CASES:
            continue
        for case in getattr(importlib.import_module(f"contract.algorithms.{path.stem}"), "CASES", ()):
            if case.name in found:
                raise ValueError(f"{path.name}: there is another case {case.name!r}.")
            found[case.name] = case
    return found
