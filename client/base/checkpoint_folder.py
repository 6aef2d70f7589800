"""Where a job keeps checkpoints: what ``--checkpoint-dir`` says, and ``Checkpointer`` takes where none is named."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "BAGUA_CHECKPOINT_DIR"
"""In the environment of ranks: an absolute path."""


def absolute(folder: Path) -> str:
    """As ranks get it, wherever they run. It need not be there: it may be one of other machines."""
    return str(folder.expanduser().absolute())
