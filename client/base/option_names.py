"""Spellings of options."""

from __future__ import annotations

from typing import Any


def hyphens(name: str) -> str:
    """Turns ``nproc_per_node`` into ``nproc-per-node``."""
    return name.replace("_", "-")


# Settings of every command: help by either name, and an option by either spelling, as with torchrun.
COMMAND_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "token_normalize_func": hyphens}
