"""Where a job keeps checkpoints: what ``--checkpoint-dir`` says, and ``Checkpointer`` takes where none is named."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "BAGUA_CHECKPOINT_DIR"
"""In the environment of ranks: an absolute path."""


def absolute(folder: Path) -> str:
    """As ranks get it, wherever they run. It need not be there: it may be one of other machines."""
    return str(folder.expanduser().absolute())


def name_of(step: int) -> str:
    """Of the folder of a checkpoint, which is there once it is whole."""
    return f"step_{step:010d}"


ON_REQUEST = "BAGUA_CHECKPOINT_ON_REQUEST"
"""In the environment of ranks, 1: a ``Checkpointer`` looks every few seconds whether a checkpoint is asked for."""

_REQUEST = ".save-now"


def request(folder: Path) -> None:
    """Asks the job that writes into ``folder`` for a checkpoint. Raises OSError."""
    (folder / _REQUEST).write_text("")


def answer(folder: Path, step: int) -> None:
    """By rank 0: the checkpoint that was asked for is that of ``step``."""
    (folder / _REQUEST).write_text(str(step))


def requested(folder: Path) -> bool:
    """Whether a checkpoint is asked for, and no step has been chosen yet."""
    try:
        return not (folder / _REQUEST).read_text()
    except OSError:
        return False


def answered(folder: Path) -> int:
    """The step of the checkpoint that was asked for; 0 before rank 0 has chosen one."""
    try:
        return int((folder / _REQUEST).read_text() or 0)
    except (OSError, ValueError):
        return 0


def forget_request(folder: Path) -> None:
    """There is none any more."""
    (folder / _REQUEST).unlink(missing_ok=True)
