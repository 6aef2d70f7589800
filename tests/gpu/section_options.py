"""The command line of a section. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that every section understands."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--result", type=Path, required=True, help="file for the findings")
    made.add_argument("--seconds", type=float, default=60.0, help="time that it has")
    made.add_argument("--device", choices=["cuda", "fake", "cpu"], default="cuda", help="others: rehearsals")
    return made


def options(description: str | None, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of a section that has no options of its own."""
    return parser(description).parse_args(words)
