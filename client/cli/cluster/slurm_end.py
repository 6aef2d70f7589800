"""The end of an allocation of Slurm that is announced by a signal: a checkpoint, the end of the job, and a new start.

SIGUSR1 comes before the time limit (``sbatch --signal=B:USR1@120``). SIGTERM comes with a preemption, a requeue, a
cancellation, and the time limit itself.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

from bagua.base import checkpoint_folder
from bagua.cli.cluster.slurm import requeue

if TYPE_CHECKING:
    from bagua.cli.cluster.hosts import Way
    from bagua.cli.cluster.interrupts import Interrupts
    from bagua.cli.display.terminal import Terminal

# After SIGTERM Slurm waits half a minute by default (KillWait).
CHECKPOINT_PATIENCE_S = {signal.SIGUSR1: 600.0, signal.SIGTERM: 25.0}


class Announcements:
    """Answers these signals once the job runs. ``ending``: one has come."""

    def __init__(self, way: Way, interrupts: Interrupts, terminal: Terminal, checkpoints: str) -> None:
        """``checkpoints``: the folder of the job's checkpoints; empty if it has none."""
        self.ending: signal.Signals | None = None
        self._way = way
        self._interrupts = interrupts
        self._terminal = terminal
        self._checkpoints = Path(checkpoints) if checkpoints else None
        for number in CHECKPOINT_PATIENCE_S:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupts.follower is None or self.ending is not None:
            self._interrupts.end(number)  # still starting, or the second one
            return
        self.ending = signal.Signals(number)
        Thread(target=self._end, args=(self.ending,), daemon=True, name="end of the allocation").start()

    def _end(self, number: signal.Signals) -> None:
        self._way.announce_end()
        self._interrupts.reason = f"Slurm job {self._way.job} ends ({number.name})"
        self._terminal.note(f"{number.name}: Slurm job {self._way.job} is about to end.")
        try:
            if self._checkpoints is not None:
                self._terminal.note(self._save(self._checkpoints, CHECKPOINT_PATIENCE_S[number]))
        except OSError as error:
            self._terminal.note(f"No checkpoint can be asked for: {error}")
        finally:
            self._interrupts.end(number)

    def _save(self, folder: Path, patience_s: float) -> str:
        """Asks for a checkpoint and waits for it. Raises OSError."""
        if not folder.is_dir():
            return f"There is no checkpoint: the script has made no Checkpointer for {folder}."
        checkpoint_folder.request(folder)

        def there() -> bool:
            step = checkpoint_folder.answered(folder)
            return bool(step) and (folder / checkpoint_folder.name_of(step)).is_dir()

        done = _wait(there, patience_s, self._job_ended)
        words = f"The checkpoint of step {checkpoint_folder.answered(folder)} is written." if done else ""
        checkpoint_folder.forget_request(folder)
        return words or "No checkpoint was written before the end: the job goes on from the one before."

    def _job_ended(self) -> bool:
        from bagua.client.describe import ENDED

        follower = self._interrupts.follower
        return follower is None or follower.job.state in ENDED

    def start_again(self) -> None:
        """Has Slurm start the job again if its time was over. After SIGTERM Slurm does so by itself, or somebody wants
        the end. Raises ConfigError."""
        if self.ending == signal.SIGUSR1:
            self._terminal.note(f"Slurm job {self._way.job} is queued again.")
            requeue(self._way.job)


def _wait(done: Callable[[], bool], patience_s: float, hopeless: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + patience_s
    while not (found := done()) and time.monotonic() < deadline and not hopeless():
        time.sleep(0.1)
    return found
