"""The keeper: the small process that a node's user starts. It is the parent of the daemon and of all ranks.

A daemon that is killed is started again, and finds its ranks as they are: the keeper has their exit codes, the pipes of
their output, and a few words about each job. Ranks die with the keeper (the kernel sees to that), and the daemon, too.
It also ends the ranks when the node's lease is over and the daemon can't: one that is stopped (SIGSTOP, a debugger)
ends no ranks, and they would go on while the coordinator runs their job elsewhere. If it stood still itself meanwhile,
it holds them (SIGSTOP), and the daemon asks the coordinator before anything is ended (``session/fence``).

A daemon that is installed anew takes over in the same way, at SIGHUP or when the present one asks for it.

Messages of the daemon (``do``) and to it (``say``) are in ``_directive`` and ``_tell_all``. The daemon gets everything
that is kept when it starts, then each exit.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.base.machine_clock import Standstill, boottime
from bagua.base.memory_kills import MemoryWatch
from bagua.base.notify import Notifier
from bagua.base.parent_process import die_with_parent, environment_with_parent
from bagua.base.system_limits import SCARCE, descriptor_words, process_words
from bagua.daemon.node.keeper.wire import VERSION, Message, Wire
from bagua.daemon.node.processes import proc
from bagua.daemon.node.processes.groups import inside
from bagua.daemon.node.processes.process import allow_many_files, become_reaper

LOOK_S = 1.0  # between two looks at the clock: a suspended machine wakes up later than poll() believes
KILL_S = 0.05  # between two looks at what is left
HOLD_S = 0.2  # between two looks at what is held: somebody else may have continued it
MAX_DEATHS = 5
DEATHS_S = 60.0  # a daemon that was killed so often in so many seconds is not started again
START_AGAIN_S = 1.0  # after a daemon could not be started in the place of one that was killed
LAST_KILL_S = 5.0
_PYTHON = (sys.executable, "-P")
RENEWAL_S = 240.0  # how long the daemon that is installed may take to build its core
_SAY_VERSIONS = """
import bagua.csrc, bagua.csrc.wire_version, bagua.daemon.node.host.daemon
from bagua.daemon.node.keeper.wire import VERSION
bagua.csrc.load()
print(VERSION, bagua.csrc.wire_version.WIRE_VERSION, bagua.__version__)
"""


@dataclass
class Kept:
    """A process that was started for the daemon: its name, the pipes behind its output, its exit code once it has
    ended."""

    name: str
    readers: list[int]
    code: int | None = None


class Keeper:
    """``command(fd, first)``: the daemon's command line, which gets this socket. One per process, in its main
    thread."""

    def __init__(self, command: Callable[[int, bool], tuple[Sequence[str], Sequence[int]]], restart: bool) -> None:
        self._command = command
        self._restart = restart
        self._boot_id = secrets.token_hex(8)
        self._lives = 0
        self._serves = False  # the present daemon: it has been welcome
        self._kills = 0
        self._death = ""  # of the last daemon, in words
        self._memory_watch: MemoryWatch | None = None  # of the present one
        self._replaced = 0  # the daemon that ends because the installed one takes over
        self._was_replaced = False  # so did the one that ended last
        self._deaths: list[float] = []
        self._daemon = 0
        self._wire: Wire | None = None
        self._starts_at = math.inf  # when the next daemon is tried again
        self._reserve = Reserve()
        self._kept: dict[int, Kept] = {}
        self._notes: dict[str, Any] = {}
        self._memory: dict[str, int] = {}  # by job: a file of what its engine keeps from step to step
        self._connections: list[int] = []
        self._deadline = math.inf
        self._later: dict[str, float] = {}  # jobs with a later deadline of their own
        self._standstill = Standstill()
        self._held_until, self._hold_s = 0.0, 0.0  # see ``KeeperLink.set_deadline``
        self._held: dict[int, int] = {}  # processes that are held: pid -> start time
        self._ending = False
        self._renewal: subprocess.Popen[str] | None = None  # says which versions the next daemon would have
        self._renewal_ends = math.inf
        self._renewal_asked = False  # by a signal, which may come in the midst of a message
        self._release = ("", "")  # the wire version and the version of the daemon
        self._code: int | None = None
        self._notifier = Notifier()  # systemd, where this is its service; the daemon does not see its socket

    def run(self) -> int:
        """Keeps the daemon running until it ends by itself; returns its exit code."""
        become_reaper()
        wake, waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)  # ``set_wakeup_fd`` takes none that may block
        signal.set_wakeup_fd(waker)  # poll() goes on after a signal: what is written here ends it
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGHUP, self._ask_renewal)
        # Without a handler nothing is written at a child's end.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self._notifier.status("the daemon starts, and looks for its coordinator")
        self._start()
        while self._code is None:
            poll = select.poll()
            poll.register(wake, select.POLLIN)
            if self._wire is not None:
                poll.register(self._wire.fileno(), select.POLLIN | (0 if self._wire.idle else select.POLLOUT))
            self._standstill.look(now := boottime())
            self._hear()  # after the look at the clock: this process may have been stopped itself
            if self._renewal_asked:
                self._renewal_asked = False
                self._renew()
            looks = (self._look_at_lease(now), self._look_at_renewal(), self._look_at_start())
            wait_s = min(*looks, self._notifier.beat())
            self._standstill.expect(now + wait_s)
            # Rounded up: else the last fraction of a millisecond is spent spinning.
            poll.poll(None if math.isinf(wait_s) else math.ceil(wait_s * 1000))
            with contextlib.suppress(BlockingIOError):  # something else may have ended poll()
                os.read(wake, 512)
            self._reap()
        self._end_all()
        return self._code

    # ── the daemon ──

    def _start(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        with self._reserve:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            command, descriptors = self._command(theirs.fileno(), self._lives == 0)
            with theirs:
                try:
                    started = subprocess.Popen(
                        list(command),
                        pass_fds=[theirs.fileno(), *descriptors],
                        start_new_session=True,
                        stdin=subprocess.DEVNULL,
                        env=environment_with_parent(),
                    )
                except OSError:
                    ours.close()
                    raise
        started.returncode = 0  # this process reaps it itself
        for number in descriptors:  # whoever waits for the daemon's word must see its end
            os.close(number)
        self._lives += 1
        self._serves = False
        self._daemon, self._wire = started.pid, Wire(ours)
        self._memory_watch = MemoryWatch(started.pid)
        self._tell_all()

    def _start_again(self) -> None:
        """Ranks wait for the next daemon, however long the machine can't start one."""
        self._starts_at = math.inf
        try:
            self._start()
        except OSError as error:
            words = _words(error, "the keeper")
            print(f"The daemon can't be started: {words}. It is tried again every second.", file=sys.stderr)
            self._starts_at = time.monotonic() + START_AGAIN_S

    def _look_at_start(self) -> float:
        """Starts the daemon that could not be started; seconds until the next try."""
        if not math.isinf(self._starts_at):
            if self._ending:
                self._code = 128 + signal.SIGTERM
                return 0.0
            if self._starts_at <= time.monotonic():
                self._start_again()
        return max(0.0, self._starts_at - time.monotonic())

    def _tell_all(self) -> None:
        for pid, kept in self._kept.items():
            self._say({"say": "process", "pid": pid, "name": kept.name, "code": kept.code}, kept.readers)
        for job, memory in self._memory.items():
            self._say({"say": "memory", "job": job}, [memory])
        about = {"boot_id": self._boot_id, "life": self._lives, "kills": self._kills, "notes": self._notes}
        why = {"replaced": self._was_replaced, "death": self._death}
        self._say({"say": "begin", "version": VERSION, **about, **why})

    def _say(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """``descriptors`` are open until the daemon forgets what they belong to. It does so only after it heard of it,
        so they can wait here without copies: even a keeper without free descriptors tells all that it has."""
        if self._wire is not None:
            with contextlib.suppress(OSError):  # it has died; the next one is told everything
                self._wire.send(message, descriptors, lent=True)

    def _hear(self) -> None:
        if self._wire is None:
            return
        with contextlib.suppress(OSError):  # it has died: its last words can still be read
            self._wire.flush()
        try:
            messages = self._wire.receive()
        except (EOFError, OSError):
            self._wire.close()
            self._wire = None
            return
        for message, descriptors in messages:
            if descriptors is None:
                self._refuse(message)
                continue
            kept = self._directive(message, descriptors)
            for number in descriptors:
                if number not in kept:
                    os.close(number)

    def _refuse(self, message: Message) -> None:
        """A message whose descriptors were lost, because there was no room for them here."""
        words = descriptor_words(OSError(errno.EMFILE, ""), "the keeper of this node")
        print(f"A request of the daemon is refused ({message['do']}): {words}.", file=sys.stderr)
        if message["do"] == "spawn":
            self._say({"say": "spawned", "id": message["id"], "errno": errno.EMFILE, "text": words})
        else:
            self._say({"say": "not kept", "what": message["do"], "job": message.get("job", ""), "reason": words})

    def _directive(self, message: Message, descriptors: list[int]) -> Sequence[int]:
        """The descriptors that stay here."""
        match message["do"]:
            case "spawn":
                return self._spawn(message, descriptors)
            case "load":
                with contextlib.suppress(Exception):  # the first process will tell
                    _core()
            case "ready":
                self._serves = True
                self._notifier.ready(message["status"])
                self._release = message.get("release", ("", ""))
            case "note":
                self._notes[message["job"]] = message["note"]
            case "memory":
                self._drop_memory(message["job"])
                self._memory[message["job"]] = descriptors[0]
                return descriptors
            case "forget":
                self._forget(message["job"], message["pids"])
            case "connections":
                for number in self._connections:
                    os.close(number)
                self._connections = descriptors
                return descriptors
            case "deadline":
                self._deadline, self._later = message["at"], message["later"]
                self._held_until, self._hold_s = message.get("held_until", 0.0), message.get("hold_s", 0.0)
                self._standstill.matters_to(self._hold_s)
            case "renew":
                self._renew()
        return ()

    def _spawn(self, message: Message, descriptors: list[int]) -> Sequence[int]:
        answer: Message = {"say": "spawned", "id": message["id"]}
        stdout, stderr, *readers = descriptors
        try:
            with self._reserve, inside(message.get("group", "")), proc.marked(message.get("mark", 0)):
                pid = _core().spawn(
                    message["argv"], message["env"], message["cwd"], stdout, stderr, user=message.get("user")
                )
        except OSError as error:
            self._say({**answer, "errno": error.errno, "text": _words(error, "the keeper of this node")})
            return ()
        except Exception as error:
            self._say({**answer, "errno": 0, "text": str(error)})
            return ()
        self._kept[pid] = Kept(message["name"], readers)
        self._say({**answer, "pid": pid})
        return readers

    def _drop_memory(self, job: str) -> None:
        if (memory := self._memory.pop(job, None)) is not None:
            os.close(memory)

    def _forget(self, job: str, pids: Sequence[int]) -> None:
        self._notes.pop(job, None)
        self._drop_memory(job)
        for pid in pids:
            if (kept := self._kept.pop(pid, None)) is not None:
                for number in kept.readers:
                    os.close(number)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):  # there are no children
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                code = os.waitstatus_to_exitcode(status)
                if self._renewal is not None and pid == self._renewal.pid:
                    self._renewed(code)
                elif pid == self._daemon:
                    self._daemon_ended(code)
                elif pid in self._kept:
                    self._kept[pid].code = code
                    self._say({"say": "exited", "pid": pid, "code": code})

    def _daemon_ended(self, code: int) -> None:
        self._was_replaced, self._daemon = self._daemon == self._replaced, 0
        self._hear()  # its last words
        now = time.monotonic()
        runs = any(kept.code is None for kept in self._kept.values())
        if code > 0 and runs and not (self._serves or self._ending):  # its disk is full, or read-only
            print("The daemon can't start. It is tried again every second while ranks run.", file=sys.stderr)
            self._starts_at = now + START_AGAIN_S
            return
        self._deaths = [at for at in self._deaths if at > now - DEATHS_S] + [now]
        if code >= 0 or self._ending or not self._restart or len(self._deaths) >= MAX_DEATHS:
            self._code = code if code >= 0 else 128 - code  # as a shell tells a death by a signal
            return
        self._death = ""
        if self._was_replaced:
            print("The daemon is replaced by the one that is installed; its ranks go on.", file=sys.stderr)
        else:
            self._kills += 1
            self._death = f"was killed by {signal.Signals(-code).name}"
            print(f"The daemon {self._death}; it is started again, and its ranks go on.", file=sys.stderr)
            if code == -signal.SIGKILL and self._memory_watch is not None:
                self._death += f". {self._memory_watch.explain()}"
        self._start_again()

    # ── signals ──

    def _pass_on(self, number: int, frame: object) -> None:
        self._ending = True
        self._notifier.stopping()
        if self._daemon:
            os.kill(self._daemon, number)

    def _ask_renewal(self, number: int, frame: object) -> None:
        self._renewal_asked = True

    def _renew(self) -> None:
        """The daemon that is installed now takes over, if it understands this keeper and the ranks that run."""
        if not self._restart:
            self._stay("it lives for one job alone, and ends with it")
        elif self._ending:
            self._stay("the node is about to end")
        elif self._renewal is None:
            self._notifier.reloading()
            try:
                with self._reserve:
                    self._renewal = subprocess.Popen([*_PYTHON, "-c", _SAY_VERSIONS], stdout=subprocess.PIPE, text=True)
            except OSError as error:
                self._stay(f"the one that is installed can not be asked: {error.strerror}")
                return
            self._renewal_ends = time.monotonic() + RENEWAL_S

    def _look_at_renewal(self) -> float:
        """Ends it when it takes too long; seconds until then."""
        if self._renewal is None:
            return math.inf
        left = self._renewal_ends - time.monotonic()
        if left <= 0:
            _kill([self._renewal.pid])
        return left if left > 0 else LOOK_S

    def _renewed(self, code: int) -> None:
        """Ranks wait for the next daemon as after a crash."""
        assert self._renewal is not None
        renewal, self._renewal = self._renewal, None
        assert renewal.stdout is not None
        with renewal.stdout:  # what builds the core may hold the other end, and live on
            said = os.read(renewal.stdout.fileno(), 4096).decode() if code == 0 else ""
        wire, *release = said.split() or [""]
        renewal.returncode = code
        runs = any(kept.code is None for kept in self._kept.values())
        if code != 0:
            self._stay("the one that is installed can not start: this node's log tells why")
        elif wire != str(VERSION):
            self._stay(
                f"it would need another keeper (version {wire}, not {VERSION}): drain the node and start it again"
            )
        elif runs and release[0] != self._release[0]:
            new, old = (f"bagua {version} (wire version {number})" for number, version in (release, self._release))
            self._stay(f"it is {new}, which can't talk with ranks of {old}: drain the node, or wait for their end")
        elif self._daemon:
            self._deaths.clear()  # those of the former release do not count against the next
            self._replaced = self._daemon
            os.kill(self._daemon, signal.SIGKILL)  # at SIGTERM it would end its jobs

    def _stay(self, reason: str) -> None:
        print(f"The daemon is not replaced: {reason}.", file=sys.stderr)
        if not self._ending:
            self._notifier.ready(f"the daemon is not replaced: {reason}")
        self._say({"say": "not renewed", "reason": reason})

    # ── ends ──

    def _look_at_lease(self, now: float) -> float:
        """Ends what runs when the lease is over, or holds it, but for jobs that have more time; seconds until the next
        look."""
        over = [at for at in (self._deadline, *self._later.values()) if at <= now]
        spared = {job: at for job, at in self._later.items() if at > now}
        if over and now < max(self._held_until, self._standstill.woke + self._hold_s):
            self._hold(self._below(spared))
            return HOLD_S
        if over:
            if found := self._below(spared):
                self._say({"say": "acted", "deadline": max(over), "spared": list(spared)})
                _kill(found)
                text = f"The daemon could not renew the lease: {len(found)} processes are ended."
                print(text, file=sys.stderr)
                return KILL_S
            self._deadline, self._later = math.inf, spared  # until others come
        self._hold([])
        left = min((self._deadline, *self._later.values())) - now
        return min(left, LOOK_S) if not math.isinf(left) else math.inf

    def _hold(self, pids: Sequence[int]) -> None:
        """Stops these processes; those that were held and are not among them go on."""
        for pid, started in self._held.items():
            if pid not in pids and proc.start_time(pid) == started:  # else the number is another's by now
                _signal(pid, signal.SIGCONT)
        self._held = {pid: proc.start_time(pid) for pid in pids}
        for pid in pids:
            _signal(pid, signal.SIGSTOP)

    def _below(self, spared: Collection[str] = ()) -> list[int]:
        """Processes below this one, but for the daemon and what it runs itself, and but for ranks of these jobs and
        what belongs to them."""
        with self._reserve:
            return self._look_below(spared)

    def _look_below(self, spared: Collection[str]) -> list[int]:
        leaders = {pid for pid, kept in self._kept.items() if kept.name.rpartition("/")[0] in spared}
        tops = {self._daemon, *leaders} - {0} | ({self._renewal.pid} if self._renewal is not None else set())
        left = {status.pid for top in tops for status in proc.below(top)} | tops
        found = [status for status in proc.below(os.getpid()) if status.pid not in left]
        return [status.pid for status in found if status.session not in leaders]

    def _end_all(self) -> None:
        give_up = time.monotonic() + LAST_KILL_S
        while (found := self._below()) and time.monotonic() < give_up:
            _kill(found)
            time.sleep(KILL_S)
            self._reap()


class Reserve:
    """Descriptors that are held for work which must go on when there are no others: free inside a ``with``."""

    SIZE = 8

    def __init__(self) -> None:
        self._held: list[int] = []
        self._fill()

    def __enter__(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def __exit__(self, *error: object) -> None:
        self._fill()

    def _fill(self) -> None:
        with contextlib.suppress(OSError):  # what was used up meanwhile
            while len(self._held) < self.SIZE:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def _kill(pids: Sequence[int]) -> None:
    for pid in pids:
        _signal(pid, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _words(error: OSError, who: str) -> str:
    if error.errno in SCARCE:
        return descriptor_words(error, who)
    return process_words() if error.errno == errno.EAGAIN else error.strerror or str(error)


def _core() -> Any:
    """The native core. The daemon has loaded it before it asks for anything, so it is built."""
    import bagua.csrc

    return bagua.csrc.load()


def keep(arguments: Sequence[str]) -> int:
    """Runs a daemon with these options, again if it is killed; its exit code. Descriptors for its first words are for
    its first life. A daemon on a leash is that of one job, which ends with it."""
    # SIGTERM: the daemon ends in good order then.
    if "--death-signal" in arguments and not die_with_parent(signal.SIGTERM):
        return 0
    allow_many_files()  # the daemon and all ranks inherit it
    first, later = _split(arguments)

    def command(descriptor: int, first_life: bool) -> tuple[Sequence[str], Sequence[int]]:
        given = arguments if first_life else later
        own = ["--keeper-fd", str(descriptor)]
        passed = [int(value) for value in first.values() if first_life and value and value.isdecimal()]
        return [*_PYTHON, "-m", "bagua.daemon.node", *given, *own], passed

    return Keeper(command, restart=first["leash"] is None).run()


def _split(arguments: Sequence[str]) -> tuple[dict[str, str | None], list[str]]:
    """Returns (descriptors for the first life of the daemon, the options of all lives)."""
    # All other options, --help too, are the daemon's.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--ready-fd", "--leash"):
        parser.add_argument(name)
    first, later = parser.parse_known_args(arguments)
    return vars(first), later
