"""The command line of a section. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def options(description: str | None, words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of a section."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--result", type=Path, required=True, help="file for the findings")
    parser.add_argument("--seconds", type=float, default=60.0, help="time that it has")
    parser.add_argument("--device", choices=["cuda", "fake", "cpu"], default="cuda", help="others: rehearsals")
    return parser.parse_args(words)
