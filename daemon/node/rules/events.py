"""Events and instructions of the job's state machine (transitions.py). ``rank`` is that of the first generation: the
member number of a process. Those of elastic jobs alone stand below the others."""

from __future__ import annotations

from dataclasses import dataclass

# ── Events ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Event:
    """Base class of all that can happen."""


@dataclass(frozen=True)
class EngineReady(Event):
    address: str  # host:port of the data plane; empty with one host


@dataclass(frozen=True)
class PrepareFailed(Event):
    text: str


@dataclass(frozen=True)
class PeersKnown(Event):
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class RankStarted(Event):
    rank: int
    pid: int


@dataclass(frozen=True)
class SpawnFailed(Event):
    rank: int
    text: str


@dataclass(frozen=True)
class RankJoined(Event):
    """An RPC of the rank was answered with the way to the engine."""

    rank: int
    pid: int


@dataclass(frozen=True)
class RankConnected(Event):
    """The core accepted the rank."""

    rank: int


@dataclass(frozen=True)
class RankLeft(Event):
    """The rank took leave of the core in good order."""

    rank: int
    at: float


@dataclass(frozen=True)
class RankLost(Event):
    """The rank's connection to the core ended without a farewell; ``after_error``: after the engine had failed."""

    rank: int
    text: str
    at: float
    after_error: bool = False


@dataclass(frozen=True)
class RankTold(Event):
    """The rank has told why its program ends before its time; ``lost``: through no fault of the program. Its process
    is about to end."""

    rank: int
    text: str
    at: float
    lost: bool = False


@dataclass(frozen=True)
class RankExited(Event):
    """``reason``: of a failure, as far as this node knows it."""

    rank: int
    exit_code: int
    signal: int
    error_tail: str
    at: float
    reason: str = ""


@dataclass(frozen=True)
class EngineFailed(Event):
    """``host``, ``node``: of the host whose loss it was; -1: none."""

    text: str
    host: int = -1
    node: str = ""


@dataclass(frozen=True)
class WaitsChanged(Event):
    text: str


@dataclass(frozen=True)
class StopRequested(Event):
    reason: str
    grace_s: float
    error: str = ""  # why it stops, where the coordinator does not know
    others_go_on: bool = False  # if the job is elastic


@dataclass(frozen=True)
class TimerFired(Event):
    pass


@dataclass(frozen=True)
class EngineClosed(Event):
    """The engine is closed and no process of the job is left."""


@dataclass(frozen=True)
class Suspended(Event):
    """The engine of an elastic job has lost a rank or a host (its index, -1: none, and its node) and suspended that
    generation. ``accused``, ``passes``: see LocalJob."""

    generation: int
    host: int
    text: str
    node: str = ""
    accused: tuple[str, ...] = ()
    passes: int = 0


@dataclass(frozen=True)
class Regrouped(Event):
    """The coordinator has decided the next generation: the local ranks in it, their members, addresses of all engines
    (none with one host). Or it has changed the members that prepare to join here (``joining``).

    ``planned``: ranks go on in the present one until the same step everywhere; ``hold``: then they wait for another."""

    generation: int
    ranks: tuple[int, ...]
    members: tuple[int, ...]
    addresses: tuple[str, ...]
    joining: tuple[int, ...] = ()
    planned: bool = False
    hold: bool = False


@dataclass(frozen=True)
class Entered(Event):
    """The engine is in that generation now, which has these members here and elsewhere. ``passes``: see LocalJob."""

    generation: int
    members: tuple[int, ...]
    passes: int = 0


@dataclass(frozen=True)
class ReadyToJoin(Event):
    """A newcomer waits for entry."""

    rank: int


@dataclass(frozen=True)
class TakesNewcomers(Event):
    """The program of that rank can take newcomers."""

    rank: int


# ── Instructions ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Instruction:
    """Something to do; its outcome comes back as an event."""


@dataclass(frozen=True)
class SpawnRanks(Instruction):
    pass


@dataclass(frozen=True)
class SetPeers(Instruction):
    addresses: tuple[str, ...]


@dataclass(frozen=True)
class RegroupEngine(Instruction):
    """The engine goes over to the newest generation."""


@dataclass(frozen=True)
class StartNewcomers(Instruction):
    """Members that prepare to join, beside ranks that go on."""

    members: tuple[int, ...]


@dataclass(frozen=True)
class Abort(Instruction):
    """Notice that the job has failed."""

    reason: str


@dataclass(frozen=True)
class Withdraw(Instruction):
    """An elastic job goes on without this node."""

    reason: str


@dataclass(frozen=True)
class SignalRanks(Instruction):
    pids: tuple[int, ...]
    signum: int


@dataclass(frozen=True)
class CloseEngine(Instruction):
    """Kill what is left of the job, close the engine."""


@dataclass(frozen=True)
class Report(Instruction):
    pass
