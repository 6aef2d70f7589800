"""Joining a job, also one that is elastic and trains already, as a program sees it."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import Store

from bagua.base.errors import CommunicationError
from bagua.torch_api.comm.checkpoint_state import Kept, keepers
from bagua.torch_api.comm.commit.retry import units
from bagua.torch_api.comm.membership_change import OnChange
from bagua.torch_api.comm.plain_data import decode, encode, tensor_paths
from bagua.torch_api.job import start
from bagua.torch_api.job.session import CURRENT, Session, current

LOOK_S = 0.05  # a look reads one flag of the engine: cheap beside a loss, which takes a tenth of a second


class Stateful(Protocol):
    """An object with a state, as learning rate schedulers and ``GradScaler`` have."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class _State:
    """A state that newcomers take over."""

    def __init__(self, held: Stateful) -> None:
        self._held = held
        self._taken: Any = None

    def describe(self) -> str:
        return type(self._held).__name__

    def difference(self, mine: str, other: str) -> str:
        return f"It is a {mine} here, and a {other} on the others."

    def give(self, tensors: list[torch.Tensor]) -> Any:
        return encode(self._held.state_dict(), tensors, shards=False)

    def take(self, document: Any, tensors: list[torch.Tensor]) -> None:
        self._taken = decode(document, tensors)

    def taken(self) -> None:
        state, self._taken = self._taken, None
        self._held.load_state_dict(state)

    # See ``Keeper``: the state of rank 0 is that of all, as it is for newcomers.

    def keep(self) -> Kept:
        tensors: list[torch.Tensor] = []
        document = encode(self._held.state_dict(), tensors, shards=False)
        named = dict(zip(tensor_paths(document), tensors, strict=True))
        return Kept({"type": self.describe(), "state": document}, of_first=named)

    def misfit(self, document: Any) -> str:
        mine = self.describe()
        return "" if document["type"] == mine else f"It is a {document['type']} there, and a {mine} here."

    def make_room(self, document: Any, own: Any) -> Kept:
        tensors: list[torch.Tensor] = []
        self.take(document["state"], tensors)
        return Kept(None, of_first=dict(zip(tensor_paths(document["state"]), tensors, strict=True)))

    def filled(self, ranks: int) -> None:
        self.taken()


def _states(_: Session) -> dict[str, _State]:
    """The states of one session, by name: ``Session.keep`` holds them."""
    return {}


def init_process_group(
    store: Store | None = None, rank: int = -1, world_size: int = -1, local_world_size: int = -1
) -> None:
    """Joins this process to its job. Call it once, before anything else of this library, on every rank.

    A process started by ``bagua run`` or by a node daemon finds its daemon by itself. Any other (torchrun,
    ``torch.multiprocessing.spawn``, plain ``python``) gets a daemon for the life of the job: RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT say who takes part, as for ``torch.distributed``, or a ``store`` does, together with
    ``rank``, ``world_size`` and ``local_world_size``, which the environment then has, too, until
    ``destroy_process_group``. Several such hosts
    need a secret that all of them hold (BAGUA_JOB_SECRET; client/README.md names the other ways).

    Where ``torch.distributed`` is not up yet, it is afterwards, on Gloo (and NCCL for CUDA tensors), for the program's
    own calls; nothing of this library goes through it. BAGUA_TORCH_DISTRIBUTED=0 leaves it alone. If it can't be
    brought up, a warning says so. In an elastic job it comes up again whenever members have changed.

    An elastic job goes on without ranks that are lost meanwhile.

    Raises RuntimeError if called twice, ConfigError for settings that can't be, ServiceError if the daemon refuses or
    can't be reached, CommunicationError if the job is over, or loses a rank meanwhile and is not elastic.
    """
    start.begin(store, rank, world_size, local_world_size)
    session = current()
    if session.elastic:
        units(session).begin()
        if session.membership.island_size > 1:
            threading.Thread(target=_follow_losses, args=(session,), name="bagua losses", daemon=True).start()


def _follow_losses(session: Session) -> None:
    """Enters the next generation for a rank whose program does not come to it: after a loss it may wait in torch's own
    operation for another rank of its island, which waits for all members of that generation."""
    before = 0
    while session is CURRENT.session:
        time.sleep(LOOK_S)
        over = session.membership.generation if session.connection.generation_is_over() else 0
        if over and over == before and not session.newcomer:  # the program has had time to enter it
            try:
                units(session).recover(over)
            except CommunicationError:  # the job is over, which the program hears in its next operation
                return
        before = over


def is_newcomer() -> bool:
    """Returns True if this process joins a job that trains already, and has not been let in yet.

    Until then it runs its script among the newcomers of its host alone: ranks, world size and all that communicates are
    theirs. ``wait_to_join``, or the first epoch of an ``ElasticSampler``, lets it in.
    """
    return CURRENT.session is not None and CURRENT.session.newcomer


def wait_to_join() -> None:
    """A newcomer waits here until it is let in: then it has the state of the others, and goes on as they do. On others
    it returns at once.

    For loops without an ``ElasticSampler``, which does the same by itself. Call it at the beginning of each training
    step: that is where newcomers begin, and where planned changes take place. Nothing happens in jobs that are not
    elastic. Raises BaguaError before ``init_process_group``, CommunicationError when the job is over.
    """
    session = current()
    if not session.elastic:
        return
    running = units(session)
    running.take_newcomers()
    if session.newcomer:
        running.join(marked=True)
    else:
        running.between_steps()


def register_state(name: str, held: Stateful) -> None:
    """Newcomers take over the state of ``held``, and so does a job that resumes from a checkpoint (``Checkpointer``).
    ``held`` has ``state_dict`` and ``load_state_dict``: a scheduler, a GradScaler, an object of the program. Models and
    their optimizers, samplers and random generators need none.

    All members register the same names, before a newcomer is let in. The state may hold tensors, numbers, texts, None,
    and lists, tuples and dictionaries of these. Raises TypeError, which names it, for anything else, ValueError if
    there is one of that name, BaguaError before ``init_process_group``.
    """
    if not (hasattr(held, "state_dict") and hasattr(held, "load_state_dict")):
        raise TypeError(
            f"register_state({name!r}) got a {type(held).__name__}: it needs state_dict and load_state_dict. [BG616]"
        )
    session = current()
    states = session.keep(_states)
    if name in states:
        raise ValueError(f"There is a state {name!r} already: choose another name. [BG616]")
    try:
        encode(held.state_dict(), [], shards=False)  # asked now, at the mistake, and not when a newcomer comes
    except TypeError as error:
        raise TypeError(f"The state of {name!r} could not be taken over by newcomers: {error}. [BG616]") from None
    states[name] = _State(held)
    keepers(session).add("state", states[name], name)
    if session.elastic:
        units(session).admission.carry("state", states[name], name)


def on_membership_change(function: OnChange) -> OnChange:
    """``function(change)`` is called in the thread that communicates, each time the members of an elastic job have
    changed: at the end of the exchange that met the change, on each rank. ``change``: ``MembershipChange``.

    It must not communicate: ranks come to it at different moments. What it raises reaches the caller of the exchange.
    Returns ``function``, so that it may be used as a decorator.
    """
    units(current()).changes.functions.append(function)
    return function
