"""Interrupts (Ctrl-C, or a signal handler that raises) in the middle of operations: the program goes on, and so do the
other ranks, which get what they would have got."""

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from rig.files import await_file

import bagua.torch_api as bagua
from bagua.base.errors import CommunicationError
from bagua.torch_api.comm.block_exchange import LeftBehind, RowExchange
from bagua.torch_api.job.session import current

TIMES = 6  # more than a rank has room for, if each of them leaves 256 operations behind


def interrupt(call, after_s):
    """Whether a SIGINT that comes then ends the call."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have jobs in the background ignore it
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        call()
    except KeyboardInterrupt:
        return True
    return False


def rank_adds_up(folder, elements, shared, times):
    """Rank 0 is interrupted, and comes to the barrier; rank 1 calls the operation afterwards."""
    bagua.init_process_group()
    found = []
    for number in range(times):
        file = Path(folder, f"interrupted-{number}")
        tensor = bagua.empty(elements) if shared else torch.empty(elements)
        tensor.fill_(1.0)
        bagua.barrier()
        if bagua.get_rank() == 0:
            found.append(interrupt(lambda given=tensor: bagua.allreduce_inplace(given), 0.1))
            del tensor
            file.touch()
        else:
            await_file(file)
            bagua.allreduce_inplace(tensor)
            found.append(tensor.unique().tolist())
        bagua.barrier()
    return found


@pytest.mark.parametrize(
    ("elements", "shared", "times"),
    [
        pytest.param(16, False, 1, id="small"),
        pytest.param(1 << 20, False, 1, id="in pieces, through a stage"),
        pytest.param(4 << 20, True, 1, id="in shared memory"),
        pytest.param(32 << 20, True, TIMES, id="in shared memory, again and again", marks=pytest.mark.full),
    ],
)
def test_the_other_rank_gets_its_sum(ranks, tmp_path, elements, shared, times):
    found = ranks.run(rank_adds_up, 2, folder=str(tmp_path), elements=elements, shared=shared, times=times)
    assert found == [[True] * times, [[2.0]] * times]


def rank_exchanges(folder):
    """Rank 0 is interrupted while it waits in the second exchange, and makes a third one."""
    bagua.init_process_group()
    rank, count = bagua.get_rank(), 1000

    def exchange(value):
        given, taken = torch.full((2 * count,), float(value + rank)), torch.zeros(2 * count)
        bagua.alltoall_v(given, [count, count], [0, count], taken, [count, count], [0, count])
        return float(taken[count * (1 - rank)])

    found = [exchange(10)]
    bagua.barrier()
    if rank == 0:
        assert interrupt(lambda: exchange(100), 0.3)
        Path(folder, "interrupted").touch()
        found.append(exchange(200))
        bagua.barrier()
        current().keep(LeftBehind).look()
        assert not current().keep(LeftBehind)._left
    else:
        await_file(Path(folder, "interrupted"))
        found += [exchange(100), exchange(200)]
        bagua.barrier()
    return found


def test_memory_of_an_interrupted_exchange_is_not_used_again(ranks, tmp_path):
    assert ranks.run(rank_exchanges, 2, folder=str(tmp_path)) == [[11.0, 201.0], [10.0, 100.0, 200.0]]


BLOCKS = 300


def rank_has_many_blocks():
    """As of a mixture of experts with as many experts on each rank: both ranks are at the limit at the same time."""
    rank = bagua.get_rank()
    rows = RowExchange(current(), bagua.communication.new_group([0, 1]).get_global_communicator(), torch.zeros(1), 4)
    out, into = rows.rows(BLOCKS), rows.rows(BLOCKS)
    out.tensor.copy_(torch.arange(BLOCKS)[:, None].expand(BLOCKS, 4) + 1000.0 * rank)
    spans = [[(number, 1) for number in range(BLOCKS)] if peer != rank else [] for peer in range(2)]
    rows.run(out, spans, into, spans)
    assert into.tensor[:, 0].tolist() == [1000.0 * (1 - rank) + number for number in range(BLOCKS)]


def test_more_blocks_than_may_be_under_way(pools):
    pools([0], [1]).run(rank_has_many_blocks)


def rank_with_handler(folder):
    """A handler calls a small all-reduce while its thread is in another one."""
    bagua.init_process_group()
    bagua.barrier()
    told = ""
    if bagua.get_rank() == 1:
        await_file(Path(folder, "told"))
        bagua.allreduce_inplace(torch.ones(1))
        return told

    def on_alarm(*_):
        nonlocal told
        try:
            bagua.allreduce_inplace(torch.ones(1))
        except CommunicationError as error:
            told = str(error)
        Path(folder, "told").touch()

    signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.005)
    total = torch.ones(1)
    bagua.allreduce_inplace(total)
    assert total.item() == 2.0
    return told


def test_a_handler_that_communicates_is_told(ranks, tmp_path):
    """It would wait for its own thread. Where the alarm came too early or too late, it was an operation of its own."""
    told, _ = ranks.run(rank_with_handler, 2, folder=str(tmp_path))
    assert "a signal handler called a collective operation while its thread is in another one" in told
