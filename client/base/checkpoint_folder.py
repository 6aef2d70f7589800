"""The folder of a job's checkpoints: ``--checkpoint-dir`` names it, and ``Checkpointer`` takes it if none is named."""

from __future__ import annotations

from pathlib import Path

VARIABLE = "BAGUA_CHECKPOINT_DIR"  # in the environment of ranks: an absolute path


def absolute(folder: Path) -> str:
    """Returns the absolute path that ranks get. The folder need not exist here: it may be one of other machines."""
    return str(folder.expanduser().absolute())


def name_of(step: int) -> str:
    """Returns the name of a checkpoint's folder, which exists once the checkpoint is whole."""
    return f"step_{step:010d}"


# In the environment of ranks, 1: a ``Checkpointer`` looks every few seconds whether a checkpoint is asked for.
ON_REQUEST = "BAGUA_CHECKPOINT_ON_REQUEST"

_REQUEST = ".save-now"


def request(folder: Path) -> None:
    """Asks the job that writes into ``folder`` for a checkpoint. Raises OSError."""
    (folder / _REQUEST).write_text("")


def answer(folder: Path, step: int) -> None:
    """Notes, on rank 0, that the checkpoint that was asked for is that of ``step``."""
    (folder / _REQUEST).write_text(str(step))  # the content tells: empty is a request, a number its answer


def requested(folder: Path) -> bool:
    """True if a checkpoint is asked for, and no step has been chosen yet."""
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
    """Removes the request."""
    (folder / _REQUEST).unlink(missing_ok=True)
