"""Worlds of the same processes, which nothing has started a daemon for: one cluster serves them all, and ends with the
last of these processes."""

import json
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

import psutil
import pytest
import torch
from rig.limits import SOON_S
from rig.ranks import forking

CLUSTER = "bagua.daemon.ephemeral"


def obey(address):
    """A process that does what the test says."""
    with Client(address, "AF_UNIX") as test:
        while True:
            try:
                name, arguments = test.recv()
            except EOFError:
                return
            test.send(globals()[name](**arguments))


def world(api, file, rank, size, local=0, stay=False):
    """A world of ``size`` ranks, ``local`` on each host (0: there is one): (their sum, the folder of their daemon).

    The environment is afterwards as it was before, and meanwhile, too, where torch.distributed began the world."""
    import torch.distributed as dist

    import bagua.torch_api as bagua
    from bagua.torch_api.job.session import current

    before = dict(os.environ)
    store = dist.FileStore(file, size)
    values = torch.full((8,), float(rank + 1))
    if api == "bagua":
        bagua.init_process_group(store, rank, size, local or size)
        bagua.allreduce_inplace(values, op=bagua.ReduceOp.SUM)
    else:
        dist.init_process_group("bagua", store=store, rank=rank, world_size=size)
        dist.all_reduce(values)
    folder = str(Path(current().data_socket).parent)
    place = (bagua.get_rank(), bagua.get_world_size(), bagua.get_local_rank(), bagua.get_local_size())
    here = local or size
    assert place == (rank, size, rank % here, here) and (api == "bagua" or os.environ == before)
    if not stay:
        (bagua if api == "bagua" else dist).destroy_process_group()
        assert os.environ == before
    return values[0].item(), folder


def fork():
    """A child that lives on by itself."""
    child = os.fork()
    if child == 0:
        with suppress(KeyboardInterrupt):
            signal.pause()
        os._exit(0)
    return child


class Processes:
    """Processes that begin worlds together."""

    def __init__(self, folder, runtime):
        """``runtime``: where Unix sockets lie."""
        self._folder = folder
        self._runtime = runtime
        self._listener = Listener(str(runtime / "test.sock"), "AF_UNIX")
        self._worlds = 0
        self.killed = False  # a cluster was
        self.processes = []
        self._connections = []

    def add(self, number, launched=False):
        """``launched``: a launcher has told them their places, as ranks of one host."""
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self._runtime), "BAGUA_STATE_DIR": str(self._folder)}
        for rank in range(number):
            if launched:
                place = {"RANK": rank, "WORLD_SIZE": number, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": number}
                environment |= {name: str(value) for name, value in place.items()}
            arguments = json.dumps({"address": str(self._listener.address)})
            result = self._folder / f"result-{len(self.processes)}"
            with (self._folder / "output").open("ab") as output:
                argv = [str(forking.RANK_MAIN), __file__, "obey", str(result), arguments]
                process = forking.server().fork(argv, environment, output.fileno())
            assert process is not None
            self.processes.append(process)
            self._connections.append(self._listener.accept())

    def begin(self, members, api="bagua", **more):
        """Begins a world of these processes, in this order; returns what waits for it and says in which folder its
        daemon is, or the daemons of all hosts."""
        self._worlds += 1
        file = str(self._folder / f"store-{self._worlds}")
        for rank, member in enumerate(members):
            self.tell(member, "world", api=api, file=file, rank=rank, size=len(members), **more)

        def finish():
            found = [self.answer(member) for member in members]
            assert {value for value, _ in found} == {sum(range(1, len(members) + 1))}
            return " ".join(dict.fromkeys(folder for _, folder in found))

        return finish

    def tell(self, member, name, **arguments):
        self._connections[member].send((name, arguments))

    def answer(self, member):
        assert self._connections[member].poll(SOON_S), self.output()
        try:
            return self._connections[member].recv()
        except EOFError:
            raise AssertionError(self.output()) from None

    def end(self, member):
        """In good order."""
        self._connections[member].close()
        assert self.processes[member].wait(SOON_S) == 0, self.output()

    def output(self):
        return (self._folder / "output").read_text()

    def clusters(self):
        """Pids of clusters that live."""
        return {pid for pid, command in self.services().items() if CLUSTER in command}

    def services(self):
        """Living processes of clusters, by pid."""
        found = {}
        for process in psutil.process_iter(["pid"]):
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if "bagua.daemon" in command and process.environ().get("XDG_RUNTIME_DIR") == str(self._runtime):
                    found[process.pid] = command
        return found

    def until(self, condition):
        deadline = time.monotonic() + SOON_S
        while not condition():
            assert time.monotonic() < deadline, f"{self.services()} {self.output()}"
            time.sleep(0.02)

    def close(self):
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.wait(SOON_S)
        self._listener.close()


@pytest.fixture
def processes(tmp_path, short_folder):
    made = Processes(tmp_path, short_folder)
    yield made
    made.close()
    made.until(lambda: not made.services())
    if not made.killed:  # else the next cluster sweeps up
        assert not list((short_folder / "bagua").glob("run-*"))


def test_further_worlds_have_the_cluster_of_the_first(processes):
    """In another order, over the other interface, of fewer at the same time, and with a process that comes later."""
    processes.add(3)
    first = processes.begin([0, 1, 2])()
    clusters = processes.clusters()
    assert len(clusters) == 1
    assert processes.begin([2, 0, 1], "torch.distributed")() == first
    alone, others = processes.begin([2]), processes.begin([1, 0], "torch.distributed")
    assert alone() == others() == first
    processes.add(1)
    assert processes.begin([1, 3, 0, 2])() == first
    assert processes.begin([3, 2])() == first
    assert processes.clusters() == clusters


def test_ranks_that_a_launcher_started_change_places(processes):
    """The environment of the one that keeps its own is right, and that of the others is not."""
    processes.add(3, launched=True)
    first = processes.begin([0, 1, 2], "torch.distributed")()
    assert processes.begin([2, 1, 0], "torch.distributed")() == first
    assert processes.begin([0, 2, 1], "torch.distributed")() == first


def test_a_cluster_ends_with_the_last_process_that_used_it(processes):
    """The one that started it is killed, another one leaves, and a forked child lives on."""
    processes.add(3)
    first = processes.begin([0, 1, 2])()
    (cluster,) = processes.clusters()
    processes.tell(2, "fork")
    child = processes.answer(2)
    try:
        processes.processes[0].kill()
        assert processes.begin([1, 2], "torch.distributed")() == first
        processes.end(1)
        assert processes.begin([2], stay=True)() == first  # it is killed inside of a world
        assert processes.clusters() == {cluster}
        processes.processes[2].kill()
        processes.until(lambda: not processes.services())
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("part", [CLUSTER, pytest.param("bagua.daemon.node", marks=pytest.mark.full)])
def test_after_a_cluster_was_killed_the_next_world_has_another(processes, part):
    processes.add(2)
    first, processes.killed = processes.begin([0, 1])(), True
    for pid, command in processes.services().items():
        if part in command:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    processes.until(lambda: not processes.services())
    assert processes.begin([1, 0])() != first
    assert len(processes.clusters()) == 1


def test_processes_of_two_clusters_go_on_in_one(processes):
    processes.add(3)
    left, right = processes.begin([0, 1]), processes.begin([2])
    first, second = left(), right()
    assert first != second
    assert processes.begin([2, 0])() == second
    assert processes.begin([1, 2])() == first
    assert processes.begin([0])() == second
    processes.end(0)
    processes.until(lambda: len(processes.clusters()) == 1)
    assert processes.begin([2, 1])() == first


def test_hosts_keep_their_daemons_where_all_have_their_place(processes):
    """Two hosts, as agents of torchrun on this machine are."""
    processes.add(4)
    first = processes.begin([0, 1, 2, 3], local=2)()
    services = processes.services()
    assert len(first.split()) == 2
    assert processes.begin([1, 0, 3, 2], local=2)() == first
    assert processes.begin([1, 3], local=1)() == first
    assert processes.services() == services
    assert not set(processes.begin([2, 3, 0, 1], local=2)().split()) & set(first.split())
    processes.until(lambda: not services.keys() & processes.services().keys())
    again = processes.begin([2, 3, 0, 1], local=2)()
    for member in (0, 1):
        processes.processes[member].kill()
    processes.until(lambda: len(processes.services()) == 3)  # cluster, keeper and daemon of the other host
    assert processes.begin([2, 3])() != again
