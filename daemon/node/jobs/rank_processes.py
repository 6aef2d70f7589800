"""The processes of one job's ranks on this node, with their output, by member number."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import bagua.csrc
from bagua.base.memory_kills import MemoryWatch
from bagua.base.trees import remove_trees
from bagua.daemon.node.jobs.context import NodeContext
from bagua.daemon.node.jobs.engine_host import in_thread, wanted_plugin
from bagua.daemon.node.logs.file import LogFile, log_path
from bagua.daemon.node.logs.output import RankOutput
from bagua.daemon.node.processes.proc import limit_mark, marks_of, read_status, start_time
from bagua.daemon.node.processes.process import ProcessWatch, kill_members
from bagua.daemon.node.ranks import as_user, launch
from bagua.daemon.node.ranks.user import RankUser
from bagua.daemon.node.rules.job_specification import JobSpecification, Program

if TYPE_CHECKING:
    import grpc.aio
    from structlog.typing import FilteringBoundLogger

LEFTOVER_KILL_S = 5.0


class RankProcesses:
    """``on_exit(member, code)``: a process that was started here has ended; code -N: by signal N, which may be told
    twice."""

    def __init__(
        self, job_id: str, node: NodeContext, log: FilteringBoundLogger, on_exit: Callable[[int, int], None]
    ) -> None:
        self._job_id = job_id
        self._node = node
        self._log = log
        self._on_exit = on_exit
        self.folder = node.jobs_folder / job_id
        self.place = node.places.of(job_id)
        self.user: RankUser | None = None  # None: the daemon's
        self._server: grpc.aio.Server | None = None  # of these ranks alone
        self.logs = node.logs_folder / job_id
        self._secrets: dict[str, str] = {}  # of files, until the ranks have them
        # From the coordinator, which may have them no more when a rank is started later: kept while the job is here.
        self._told_secrets: dict[str, str] | None = None
        self._plugin: Path | None = None
        self._outputs: dict[int, RankOutput] = {}
        self._watches: dict[int, ProcessWatch] = {}
        self._leaders: dict[int, int] = {}  # pid -> start time
        self._memory: dict[int, MemoryWatch] = {}

    async def prepare(self, spec: JobSpecification) -> None:
        """Fetches the job's code, checks that the program can be started, reads its secrets. Raises LaunchError,
        ConfigError, BuildError, OSError."""
        if spec.program.code is not None:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            owner = (self.user.uid, self.user.gid) if self.user else None
            await self._node.code.prepare(self._job_id, spec.program.code, self.place.code, owner)
        self._secrets = await in_thread(lambda: self._look(self._here(spec.program)))
        if spec.program.secrets and self._told_secrets is None:
            self._told_secrets = await self._node.ask_secrets(self._job_id)
        self._plugin = await wanted_plugin(spec, self._node.environment)
        if self._plugin is not None and self.user is not None:
            built = self._plugin
            self._plugin = (await in_thread(lambda: self.place.publish([built])))[0]

    async def choose_user(self, spec: JobSpecification) -> None:
        """Finds the user of the ranks, and makes the place where they meet this daemon. Raises LaunchError, OSError."""
        run_as = self._node.run_as
        if run_as is not None:
            self.user = user = await in_thread(lambda: run_as.user_of(spec))
            await in_thread(lambda: self.place.make(user))
            self._log.info("ranks run as another user", user=user.name, uid=user.uid, groups=list(user.groups))

    def _look(self, program: Program) -> dict[str, str]:
        """The secrets that are files. Blocks. Raises LaunchError if the program can't be started."""
        if self.user is not None:
            return as_user.look(self.user, program, self.user.environment(self._node.environment), self._node.node_id)
        launch.check_program(program, self._node.environment)
        return launch.read_secrets(program, self._node.node_id)

    def _here(self, program: Program) -> Program:
        """Adds the folder on this node in which the program's ranks run."""
        if program.code:
            return replace(program, workdir=str(self.place.code / program.workdir))
        return replace(program, workdir=self.user.home) if self.user and not program.workdir else program

    def open_log(self, member: int) -> None:
        """Makes the log of a rank that is about to start: whoever follows it need not wait for the process. Raises
        OSError."""
        log = LogFile(log_path(self.logs, member), self._node.log_limits)
        self._outputs[member] = RankOutput(log, self._log.warning, self._node.echo, member)

    async def spawn(self, spec: JobSpecification, member: int) -> int:
        """Starts the process of ``member``, whose log is open; its pid. Raises OSError."""
        if self._node.run_as is not None and self.user is None:
            raise PermissionError("a rank would be started as root")  # never, whatever came before
        output = self._outputs[member]
        outputs = output.open()
        base, cache = self._node.environment, self._node.cache if self.user is None else None
        try:
            if self.user is not None:
                base = {**self.user.environment(base), **self.place.variables}
                for number in outputs:  # so that the rank may open /dev/stderr, too
                    os.fchown(number, self.user.uid, self.user.gid)
            pid = await self._node.keeper.spawn(
                f"{self._job_id}/{member}",
                launch.command(spec.program),
                launch.environment(
                    spec,
                    member,
                    base=base,
                    secrets={**self._secrets, **(self._told_secrets or {})},
                    rank_socket=self.place.rank_socket,
                    cache=cache,
                    plugin=self._plugin,
                ),
                str(launch.work_folder(self._here(spec.program))),
                outputs,
                output.readers,
                self.user.spawn if self.user else None,
                await in_thread(lambda: self._node.groups.make(self._job_id)),
                limit_mark(marks_of(self._job_id, self.place.rank_socket)),
            )
        finally:
            for number in outputs:  # the rank's ends: while they are open here the pipes never end
                os.close(number)
        self._watch_started(member, pid)
        return pid

    def _watch_started(self, member: int, pid: int) -> None:
        self._node.keeper.watch(pid, lambda code: self._exited(member, code))
        self._leaders[pid] = start_time(pid)
        self._memory[member] = MemoryWatch(pid)

    async def serve(self) -> None:
        """Lets another user's ranks reach the daemon at a socket of their own, and find its native code. Raises
        OSError.
        """
        if self.user is not None and self._server is None:
            place = self.place
            await in_thread(lambda: place.publish(bagua.csrc.built()))
            self._server = await self._node.serve_ranks(place.rank_socket, self._job_id, self.user.uid)

    async def leave(self) -> None:
        """Removes the job's code, and the way to the daemon, when the job has ended here."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0.1)
        if self.user is not None or self.place.code.exists():
            with contextlib.suppress(OSError):  # no thread can be started: the next life of the daemon removes it
                await in_thread(lambda: remove_trees(self._node.places.leave(self._job_id)))

    def find(self) -> dict[int, int]:
        """Takes over the processes of the job that were started in an earlier life of the daemon, with the pipes of
        their output: pids by member."""
        found = {}
        for one in [one for one in self._node.keeper.found if one.name.rpartition("/")[0] == self._job_id]:
            self._node.keeper.found.remove(one)
            member = int(one.name.rpartition("/")[2])
            log = LogFile.again(log_path(self.logs, member), self._node.log_limits)
            self._outputs[member] = output = RankOutput(log, self._log.warning, self._node.echo, member)
            output.attach(one.readers)
            found[member] = one.pid
        return found

    def watch_found(self, pids: Mapping[int, int]) -> None:
        """Tells of the ends of processes that ``find`` has found, those that lie in the past as well."""
        for member, pid in pids.items():
            self._watch_started(member, pid)

    def delete_secrets(self) -> None:
        """Deletes the secrets, once all ranks that were to have them were started."""
        self._secrets.clear()

    def watch(self, member: int, pid: int, on_exit: Callable[[], None] | None) -> None:
        """Another's process has become ``member``. ``on_exit``, if any, is called at its end, until ``unwatch``."""
        self._memory.setdefault(member, MemoryWatch(pid))
        if on_exit is None or member in self._watches:
            return
        with contextlib.suppress(OSError):  # it has died already, or lives in another pid namespace: the core will know
            self._watches[member] = ProcessWatch(pid, lambda code: on_exit())

    def unwatch(self, member: int) -> None:
        """Stops watching a process, whose end the core's connection tells from now on."""
        if watch := self._watches.pop(member, None):
            watch.close()

    def start_time(self, pid: int) -> int:
        """Clock ticks since boot; 0 if it was not started here."""
        return self._leaders.get(pid, 0)

    def log_of(self, member: int) -> LogFile | None:
        """The log of a rank that was started here."""
        output = self._outputs.get(member)
        return output.log if output else None

    def error_tail(self, member: int, told: str) -> str:
        """The last words of a rank that has ended. See ``logs.error_tail``."""
        return self._outputs[member].error_tail(told)

    def memory_kill(self, member: int) -> str:
        """Says in words whether the kernel has killed the process for want of memory; empty if that is not known."""
        memory = self._memory.get(member)
        return memory.explain() if memory is not None and memory.killed else ""

    def explain_kill(self, member: int) -> str:
        """The known reason of a SIGKILL that nobody here has sent."""
        return self._memory[member].explain()

    async def kill_all(self) -> None:
        """SIGKILL to every process of the job that is left; what they have written is taken, and their logs end."""
        marks = marks_of(self._job_id, self.place.rank_socket)
        of_group = partial(self._node.groups.processes, self._job_id)
        left = await kill_members(self._leaders, marks, LEFTOVER_KILL_S, self._node.keeper.pid, of_group)
        if left:
            self._log.error("processes do not die", pids=left)
        self._node.groups.remove(self._job_id)

    def close_outputs(self) -> None:
        """Takes what is in the pipes; logs end."""
        for output in self._outputs.values():
            output.close()

    def close(self) -> None:
        """Watches nothing any more; the keeper forgets the job."""
        self._node.keeper.release(self._job_id, list(self._leaders))
        for watch in self._watches.values():
            watch.close()

    def report_death(self, member: int, pid: int) -> None:
        """Tells of the end of a process that is dying of a signal. Its parent hears of it when the kernel has freed its
        memory, and tells again. Nothing is told if that dies itself: a host is lost, and not its ranks one by one."""
        status = read_status(pid)
        if status is None or not status.death or self._leaders.get(pid) != status.start_time:
            return
        if not self._node.keeper.doomed:
            self._exited(member, -status.death)

    def _exited(self, member: int, code: int) -> None:
        self._outputs[member].drain()
        self._on_exit(member, code)
