"""The daemon's end of the wire to its keeper: starts processes, learns of their ends, and finds those of its last
life."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import bagua
from bagua.base.errors import ConfigError
from bagua.base.system_limits import SCARCE
from bagua.csrc.wire_version import WIRE_VERSION
from bagua.daemon.node.keeper.wire import VERSION, Message, Wire
from bagua.daemon.node.processes.proc import read_status
from bagua.daemon.node.ranks.user import SpawnUser

SPAWN_S = 60.0  # how long the keeper may take to start a process: it is stopped, or the machine is


@dataclass(frozen=True)
class Found:
    """A process of the daemon's last life: its name, and the readable ends of its output, which are the finder's."""

    pid: int
    name: str
    readers: tuple[int, ...]


class KeeperLink:
    """Made with the event loop running. ``receive_state`` first."""

    def __init__(self, descriptor: int) -> None:
        self._wire = Wire(socket.socket(fileno=descriptor))
        self._loop = asyncio.get_running_loop()
        self._begun = asyncio.Event()
        self._watches: dict[int, Callable[[int], None]] = {}
        self._codes: dict[int, int] = {}
        self._spawns: dict[int, asyncio.Future[int]] = {}
        self._next = 0
        self._version = VERSION  # of the keeper
        self.pid = os.getppid()
        self.boot_id = ""
        self.life = 0
        self.kills = 0
        self.death = ""  # how the last daemon was killed, in words
        self.replaced = False  # the last daemon made room for this one; else it was killed
        self.found: list[Found] = []
        self.notes: dict[str, Any] = {}
        self._memory: dict[str, int] = {}
        self.on_refusal: Callable[[str], None] = lambda reason: None  # of ``renew``
        self.on_loss: Callable[[str], None] = lambda words: None  # the keeper could not take what it should keep
        # The last deadline at which the keeper has ended ranks, and jobs whose ranks it has left alone.
        self.acted: tuple[float, frozenset[str]] = (0.0, frozenset())
        self._loop.add_reader(self._wire.fileno(), self.hear)

    @property
    def doomed(self) -> bool:
        """True if the keeper ends, and this daemon and all ranks with it."""
        status = read_status(self.pid)
        return status is None or status.doomed or os.getppid() != self.pid

    async def receive_state(self) -> None:
        """Returns when the keeper has said what it keeps. Raises ConfigError if this daemon does not understand it:
        another release was installed, and the daemon of its own was killed."""
        await self._begun.wait()
        if self._version != VERSION:
            raise ConfigError(
                f"This daemon (bagua {bagua.__version__}) needs a keeper of version {VERSION}, and below it is one of "
                f"version {self._version}: start the node again. [BG924]"
            )

    async def spawn(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        outputs: tuple[int, int],
        readers: Sequence[int],
        user: SpawnUser | None = None,
        group: str = "",
        mark: int = 0,
    ) -> int:
        """Starts a process, which the keeper keeps under this name; its pid. ``outputs``: its stdout and stderr, pipes
        of which ``readers`` are the other ends. ``user``: None is the daemon's. ``group`` and ``mark``, from
        ``JobGroups.make`` and ``limit_mark``, stay with all that it starts. Raises OSError."""
        self._next += 1
        number = self._next
        answer: asyncio.Future[int] = self._loop.create_future()
        self._spawns[number] = answer
        message = {"do": "spawn", "id": number, "name": name, "argv": list(argv), "env": dict(env), "cwd": cwd}
        message |= {"group": group, "mark": mark}
        if user is not None:
            message["user"] = user
        try:
            self._send(message, [*outputs, *readers])
            async with asyncio.timeout(SPAWN_S):
                return await answer
        except TimeoutError:
            raise OSError(f"the keeper of this node does not answer for {SPAWN_S:g} s") from None
        finally:
            del self._spawns[number]

    def watch(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """``on_exit(code)`` is called once, when the process ends or has ended; -N: by signal N."""
        if pid in self._codes:
            self._loop.call_soon(on_exit, self._codes.pop(pid))
        else:
            self._watches[pid] = on_exit

    def note(self, job_id: str, note: Any) -> None:
        """Words that the next life of the daemon finds in ``notes``."""
        self._send({"do": "note", "job": job_id, "note": note})

    def memory(self, job_id: str) -> int:
        """A file for what the engine of a job keeps from step to step: that of the daemon's last life, or a new one,
        which the keeper holds until it forgets the job. The descriptor is the caller's. Raises OSError."""
        if (kept := self._memory.pop(job_id, None)) is not None:
            return kept
        memory = os.memfd_create(f"bagua-{job_id}", os.MFD_CLOEXEC)
        try:
            self._send({"do": "memory", "job": job_id}, [memory])
        except OSError:
            os.close(memory)
            raise
        return memory

    def release(self, job_id: str, pids: Sequence[int]) -> None:
        """Tells the keeper that the job is over here."""
        for pid in pids:
            self._watches.pop(pid, None)
            self._codes.pop(pid, None)
        self._send({"do": "forget", "job": job_id, "pids": list(pids)})

    def release_found(self) -> None:
        """Tells the keeper that nobody wants what is left of the processes and the memory of the last life."""
        for one in self.found:
            for number in one.readers:
                os.close(number)
            self.release(one.name.rpartition("/")[0], [one.pid])
        self.found.clear()
        for job_id, memory in self._memory.items():
            os.close(memory)
            self.release(job_id, [])
        self._memory.clear()

    def ready(self, status: str) -> None:
        """This daemon serves; ``status`` says where, in a line."""
        self._send({"do": "ready", "status": status, "release": [str(WIRE_VERSION), bagua.__version__]})

    def renew(self) -> None:
        """The daemon that is installed now takes the place of this one, which is killed; or ``on_refusal(reason)`` is
        called."""
        self._send({"do": "renew"})

    def load(self) -> None:
        """Lets the keeper load the native core, so that the first process starts without delay."""
        self._send({"do": "load"})

    def hold(self, connections: Sequence[int]) -> None:
        """The keeper holds copies of these instead of the last ones: their other ends see no end of them when this
        process is killed."""
        try:
            self._send({"do": "connections"}, connections)
        except OSError as error:
            self.on_loss(_not_kept({"what": "connections", "job": "", "reason": error.strerror}))

    def set_deadline(self, at: float, later: Mapping[str, float], held_until: float, hold_s: float) -> None:
        """Seconds of CLOCK_BOOTTIME at which the keeper ends what runs here; inf: never. ``later``: jobs with a later
        deadline of their own. Until ``held_until``, or ``hold_s`` after it has stood still itself, it holds them
        rather."""
        self._send({"do": "deadline", "at": at, "later": later, "held_until": held_until, "hold_s": hold_s})

    def hear(self) -> None:
        """Takes what has come by now."""
        try:
            for message, descriptors in self._wire.receive():
                self._handle(message, descriptors)
        except EOFError:  # then this process ends, too
            self._loop.remove_reader(self._wire.fileno())

    def close(self) -> None:
        if self._wire.fileno() >= 0:
            self._loop.remove_reader(self._wire.fileno())
            self._loop.remove_writer(self._wire.fileno())
            self._wire.close()

    def _send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError if there are no descriptors for copies of these."""
        if self._wire.fileno() < 0:
            return
        try:
            self._wire.send(message, descriptors)
            self._flush()
        except OSError as error:
            if error.errno in SCARCE:
                raise
            # Else the keeper is gone, and so is this process in a moment.

    def _flush(self) -> None:
        if self._wire.flush():
            self._loop.remove_writer(self._wire.fileno())
        else:
            self._loop.add_writer(self._wire.fileno(), self._flush)

    def _handle(self, message: Message, descriptors: list[int] | None) -> None:
        match message["say"]:
            case "process":
                self.found.append(Found(message["pid"], message["name"], tuple(descriptors or ())))
                if message["code"] is not None:
                    self._codes[message["pid"]] = message["code"]
            case "memory":
                if descriptors:
                    self._memory[message["job"]] = descriptors[0]
            case "begin" if message.get("version") != VERSION:
                self._version = message.get("version", 2)  # keepers of version 2 did not tell theirs
                self._begun.set()
            case "begin":
                self.boot_id, self.life, self.notes = message["boot_id"], message["life"], message["notes"]
                self.kills, self.replaced, self.death = message["kills"], message["replaced"], message.get("death", "")
                self._begun.set()
            case "spawned":
                self._spawned(message)
            case "exited":
                pid, code = message["pid"], message["code"]
                if (on_exit := self._watches.pop(pid, None)) is not None:
                    on_exit(code)
                else:
                    self._codes[pid] = code
            case "acted":
                self.acted = (message["deadline"], frozenset(message["spared"]))
            case "not renewed":
                self.on_refusal(message["reason"])
            case "not kept":
                self.on_loss(_not_kept(message))

    def _spawned(self, message: Message) -> None:
        answer = self._spawns.get(message["id"])
        if answer is None or answer.done():
            return
        if "pid" in message:
            answer.set_result(message["pid"])
        else:
            answer.set_exception(OSError(message["errno"], message["text"]))


def _not_kept(message: Message) -> str:
    """The consequence for users, in words."""
    if message["what"] == "memory":
        what = f"if this daemon is killed, job {message['job']} loses what its error feedback keeps"
    else:
        what = "if this daemon is killed, the coordinator sees its session end"
    return f"{what}: {message['reason']}"


def connections_to(address: str) -> list[int]:
    """Descriptors of this process's TCP connections to the port of ``address``: gRPC does not tell them."""
    port = address.rpartition(":")[2]
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            one = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if one.family in (socket.AF_INET, socket.AF_INET6) and _peer_port(one) == port:
                found.append(int(name))
        finally:
            one.detach()  # it is not ours to close
    return found


def _peer_port(connection: socket.socket) -> str:
    try:
        return str(connection.getpeername()[1])
    except OSError:
        return ""
