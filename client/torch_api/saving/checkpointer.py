"""Checkpoints in the background: of the whole job, by all of its ranks, beside the training."""

from __future__ import annotations

import copy
import functools
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from bagua.base import checkpoint_folder
from bagua.base.errors import BaguaError, ConfigError
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.comm.communicator import Communicator
from bagua.torch_api.comm.communicators import communicators
from bagua.torch_api.comm.joining import Stateful, register_state
from bagua.torch_api.job.session import current
from bagua.torch_api.saving import folder as on_disk
from bagua.torch_api.saving.background import Background, Task, sentence
from bagua.torch_api.saving.job_state import JOB, Return, collect, document_of, key
from bagua.torch_api.saving.schedule import Decision, Schedule
from bagua.torch_api.saving.staging import Staging
from bagua.torch_api.saving.torch_format import Checkpoint
from bagua.torch_api.train.agreement import broadcast_json, gather_texts, raise_together

LOG = logging.getLogger("bagua")
T = TypeVar("T")
DEFAULT_EVERY = timedelta(minutes=10)
NAME = "checkpointer"
# First names of tensors without which nobody can go on. Ranks beyond those that wrote a checkpoint have no state of the
# algorithm in it: they begin as newcomers do.
REQUIRED = ("model", "optimizer", "states", "ranks")


class Resumed(NamedTuple):
    """The checkpoint with which a job goes on. ``step``: training steps before it. ``ranks``: that wrote it."""

    step: int
    folder: Path
    ranks: int


class _Course:
    """Progress of the job, as all ranks know it."""

    def __init__(self) -> None:
        self.steps = 0
        self.look = 0
        self.run = ""

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Checkpointer:
    """Writes the state of the job every now and then, and goes on from it when the job is started again.

    A checkpoint holds all wrapped models with their optimizers and the state of their algorithms, what was passed to
    ``bagua.register_state``, positions of samplers, and the random generators of each rank. It is a folder in the
    format of ``torch.distributed.checkpoint``, into which each rank writes its share. It is there whole or not at all,
    whoever is killed and when, and it is verified by SHA-256 when it is loaded.

    Training pays for a copy into memory of this rank's share; a thread writes it to the disk. In an elastic job a
    checkpoint is given up if a rank is lost before it has written its share.

    Args:
        folder: The same on all hosts, or a file system that all see. None: environment variable BAGUA_CHECKPOINT_DIR,
            which ``bagua run --checkpoint-dir`` sets. It is made if it is not there.
        every: Calls of ``step`` from one checkpoint to the next, or a ``datetime.timedelta``.
        keep: So many stay, the newest ones.
        schedulers: Learning rate schedulers, and other objects with ``state_dict`` and ``load_state_dict``: short for
            ``bagua.register_state("scheduler N", …)``.

    All ranks make it, once, after ``with_bagua`` and after their samplers. Raises ConfigError, on all ranks, for a
    folder that can't be written or is not the same one everywhere, BaguaError before ``init_process_group``,
    ValueError and TypeError for other arguments.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        every: int | timedelta = DEFAULT_EVERY,
        keep: int = 3,
        *,
        schedulers: Sequence[Stateful] = (),
    ) -> None:
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ValueError(f"keep is {keep!r}: it must be a number of checkpoints from 1 on. [BG707]")
        self.folder = _folder(folder)
        on_request = os.environ.get(checkpoint_folder.ON_REQUEST) == "1"
        self._asked = functools.partial(checkpoint_folder.requested, self.folder) if on_request else None
        self._schedule = Schedule(every, time.monotonic, self._asked)
        self._keep = keep
        self._session = current()
        self._course = _Course()
        self._staging = Staging()
        self._background = Background()
        self._lock: on_disk.Lock | None = None
        self._earlier = False  # there are checkpoints of an earlier run, and it was not resumed
        for number, scheduler in enumerate(schedulers, 1):
            register_state(f"scheduler {number}", scheduler)
        try:
            register_state(NAME, self._course)
        except ValueError:
            raise BaguaError(
                "There is a Checkpointer already: a job has one, which holds all of its state. [BG707]"
            ) from None
        if not self._session.newcomer:
            self._together(self._begin)
        self._session.close_first(self._close)

    @property
    def steps(self) -> int:
        """Training steps of the job so far: calls of ``step``, those before it was resumed among them."""
        return self._course.steps

    @property
    def failed(self) -> int:
        """Checkpoints that could not be written, as far as this rank knows."""
        return self._background.failed

    @property
    def _world(self) -> Communicator:
        return communicators(self._session).world

    def _together(self, attempt: Callable[[], T]) -> T:
        """Runs ``attempt``, in which all ranks communicate. In an elastic job it runs again if a rank is lost
        meanwhile.
        """
        session = self._session
        if not session.elastic:
            return attempt()
        return units(session).together(0, lambda: self._world, attempt, numbering=communicators(session))

    def _begin(self) -> None:
        """Rank 0 prepares the folder, and all see whether they can write there."""
        world = self._world
        first = world.rank() == 0
        told: dict[str, Any] = {}
        mistake: Exception | None = None
        if first:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = self._lock or on_disk.Lock(self.folder)  # a repeat has it already
                told = {"run": secrets.token_hex(8), "earlier": on_disk.prepare(self.folder)}
                # A sign for the others: a folder of the same name on another host has none.
                (self.folder / f"{on_disk.WRITING}{told['run']}").touch()
                checkpoint_folder.forget_request(self.folder)  # it was for the run before
            except BlockingIOError:
                mistake = ConfigError(
                    f"Another job writes checkpoints into {self.folder}: end it, or choose another folder. [BG707]"
                )
            except OSError as error:
                mistake = _unusable(self.folder, error)
        raise_together(mistake, world)
        told = broadcast_json(told, world)
        sign = self.folder / f"{on_disk.WRITING}{told['run']}"
        try:
            if not sign.exists():
                raise ConfigError(
                    f"{self.folder} is another folder on this host than on that of rank 0: checkpoints need one that "
                    "all hosts share. [BG707]"
                )
            # Each rank writes: one host may have it read-only.
            probe = self.folder / f"{on_disk.WRITING}{told['run']}-{world.rank()}"
            probe.touch()
            probe.unlink()
        except (OSError, ConfigError) as error:
            mistake = _unusable(self.folder, error) if isinstance(error, OSError) else error
        raise_together(mistake, world)
        if first:
            sign.unlink(missing_ok=True)
        self._course.run, self._earlier = told["run"], told["earlier"]
        self._schedule.restart(0)

    # Writing

    def step(self) -> bool:
        """Begins a checkpoint if one is due. All ranks call it after each training step: when the optimizers have
        stepped, and schedulers, and before the next batch is taken. Returns True if a checkpoint was begun. See
        ``save`` for errors.
        """
        self._course.steps += 1
        if self._course.look > self._schedule.look:  # this rank has joined the others, who have agreed on it
            self._schedule.restart(self._course.steps - 1)
            self._schedule.look = self._course.look
        due = self._schedule.due(self._course.steps, self._agree)
        self._course.look = self._schedule.look
        if due:
            self.save()
            if self._asked is not None and self._world.rank() == 0 and self._asked():
                checkpoint_folder.answer(self.folder, self._course.steps)
        return due

    def _agree(self, decide: Callable[[], Decision]) -> Decision:
        world = self._world
        told = torch.tensor(decide() if world.rank() == 0 else (0, 0), dtype=torch.int64, device="cpu")
        world.broadcast(told, 0)
        save, look = told.tolist()
        return Decision(bool(save), look)

    def save(self) -> None:
        """Begins a checkpoint now, on all ranks. Returns when its share lies in memory, or first when the one before
        is on the disk.

        A checkpoint that can't be written is told by the ``bagua`` log, counted in ``failed``, and training goes on.
        Raises BaguaError for state that can't be told, and where ``resume`` was not called and there are checkpoints
        of an earlier run.
        """
        if self._earlier:
            raise BaguaError(
                f"{self.folder} has checkpoints of an earlier run. Call resume() before the first step to go on from "
                "them, or choose another folder. [BG707]"
            )
        self._background.wait_until_written()  # staging memory holds the last one's share until then
        world, membership = self._world, self._session.membership
        rank = world.rank()
        task = Task(
            folder=self.folder,
            run=self._course.run,
            generation=membership.generation,
            step=self._course.steps,
            rank=rank,
            members=tuple(membership.members[one] for one in world.ranks),
            present=lambda: self._session.membership.members,
            keep=self._keep,
        )
        state = collect(self._session, rank)
        pieces = self._staging.copy_share(state, rank, world.nranks())
        # A copy: the program goes on to change what its objects returned.
        self._background.start_writing(task, pieces, copy.deepcopy(state.documents))

    def _close(self) -> None:
        """Finishes all that is being written, or gives it up."""
        self._background.close()
        if self._lock is not None:
            self._lock.close()

    def wait(self) -> None:
        """Waits until this rank's share of the last checkpoint is on the disk."""
        self._background.wait_until_written()

    # Resuming

    def resume(self) -> Resumed | None:
        """Goes on from the newest checkpoint that is whole. All ranks call it, before the first step.

        One that is damaged is put aside, with a warning of the ``bagua`` log, and the one before is taken. The job may
        have another number of ranks than the one before: then ranks keep their own state, as far as there are as many,
        and others begin as newcomers of an elastic job do. Returns None, and changes nothing, if there is no
        checkpoint; also on a newcomer, which gets its state from the others.

        Raises BaguaError, on all ranks, for a checkpoint of another program, and where all are damaged.
        """
        self._earlier = False
        if self._session.newcomer:
            return None
        run = self._course.run
        found = self._together(self._resume)
        self._course.run = run  # the checkpoint brought the name of the run that wrote it
        self._schedule.restart(self._course.steps)
        self._course.look = self._schedule.look
        return found

    def _resume(self) -> Resumed | None:
        world = self._world
        first = world.rank() == 0
        # Rank 0's list: all try the same ones.
        names = broadcast_json([path.name for path in on_disk.checkpoints(self.folder)] if first else None, world)
        damaged: list[tuple[Path, str]] = []
        for name in names:
            at = self.folder / name
            manifest, words = _verified(at, world)
            if manifest is not None:
                found = self._load(at, manifest)
                if first:  # only now: without a whole one nothing is touched
                    _put_aside(damaged)
                return found
            damaged.append((at, words))
        if damaged:
            told = " ".join(f"{path.name}: {words}." for path, words in damaged)
            raise BaguaError(
                f"No checkpoint in {self.folder} can be loaded. {told} Choose another folder to train from the "
                "beginning. [BG708]"
            )
        return None

    def _load(self, at: Path, manifest: on_disk.Manifest) -> Resumed:
        world = self._world
        rank = world.rank()
        way = Return(self._session, rank, manifest.ranks)
        mistake: Exception | None = None
        try:
            checkpoint = Checkpoint(at)
            job = checkpoint.document(key(JOB))
            mine = key(document_of(rank))
            own = checkpoint.document(mine) if mine in checkpoint else None
            if words := way.misfits(job):
                mistake = BaguaError(f"{at} is a checkpoint of another program. {words} [BG709]")
        except Exception as error:  # files are as they were written: so this is another version's, or ours
            mistake = BaguaError(f"{at} can't be loaded: {error!r} [BG708]")
        raise_together(mistake, world)
        room = way.make_room(job, own)
        try:
            found = {tuple(places): (checkpoint.place(places, one), one) for places, one in room}
            absent = [
                key(places[-1]) for places, (name, _) in found.items() if name is None and places[-1][0] in REQUIRED
            ]
            if absent:
                raise BaguaError(f"it has no {', '.join(absent[:5])} of the right size [BG709]")
            checkpoint.fill({name: one for name, one in found.values() if name is not None})
        except Exception as error:
            mistake = BaguaError(f"{at} can't be loaded: {error!r} [BG708]")
        raise_together(mistake, world)
        way.filled()
        LOG.info("Training goes on from %s, written by %d ranks.", at, manifest.ranks)
        return Resumed(manifest.step, at, manifest.ranks)


def _folder(given: str | os.PathLike[str] | None) -> Path:
    text = os.environ.get(checkpoint_folder.VARIABLE, "") if given is None else os.fspath(given)
    if not text:
        raise ConfigError(
            f"Checkpointer needs a folder: pass one, or start with --checkpoint-dir, which sets "
            f"{checkpoint_folder.VARIABLE}. [BG707]"
        )
    return Path(text).expanduser().absolute()


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"Checkpoints can't be written into {folder}: {sentence(error)} Choose another folder. [BG710]")


def _verified(at: Path, world: Communicator) -> tuple[on_disk.Manifest | None, str]:
    """The manifest; None, and why, if the checkpoint is damaged. Each rank reads a share of the files."""
    manifest, words = None, ""
    try:
        manifest = on_disk.read_manifest(at)
        on_disk.verify(at, manifest, sorted(manifest.files)[world.rank() :: world.nranks()])
    except on_disk.Damaged as error:
        words = str(error)
    texts = [text.decode() for text in gather_texts(words.encode(), world)]
    told = "; ".join(dict.fromkeys(text for text in texts if text))
    return (None, told) if told else (manifest, "")


def _put_aside(damaged: Sequence[tuple[Path, str]]) -> None:
    for at, words in damaged:
        try:
            kept = f"It is kept as {on_disk.put_aside(at).name}; remove it when you like."
        except OSError as error:
            kept = f"It can't be put aside: {sentence(error)}"
        LOG.warning("Checkpoint %s is damaged: %s. The one before is taken. %s", at, words, kept)
