"""Ranks that die, calls that differ, bad input: a clear error on every rank, and no hang."""

import gc
import os
import signal
import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bagua.base.errors import ConfigError

WAIT_S = 120.0


def begin(folder, **options):
    import bagua.c10d  # noqa: F401

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("bagua", init_method=f"file://{folder}/store", rank=rank, world_size=world, **options)
    return rank


def refused(call, words, code=""):
    """``code``: of our error, which both implementations give. torch's own errors have none."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words) as raised:
        call()
    assert str(raised.value).endswith(f"[{code}]" if code else ""), raised.value


def rank_bad_input(folder):
    """Each error comes before anything is submitted, so the group works on."""
    begin(folder)
    ones = torch.ones(4)
    group = dist.group.WORLD
    assert group is not None
    refused(lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX), "SUM alone", "BG405")
    refused(lambda: group.broadcast([torch.eye(2).to_sparse()], dist.BroadcastOptions()).wait(), "to_dense|Sparse")
    refused(lambda: dist.all_gather([torch.ones(4), torch.ones(4, dtype=torch.int32)], ones), "dtype|type")
    refused(lambda: dist.all_gather([torch.ones(4)], ones), "one for each of the 2 ranks", "BG402")
    refused(lambda: dist.all_gather([torch.ones(4), torch.ones(5)], ones), "same number", "BG402")
    refused(lambda: dist.all_gather_into_tensor(torch.ones(7), ones), "2 times the 4", "BG402")
    refused(lambda: dist.reduce_scatter_tensor(ones, torch.ones(9)), "2 times the 4", "BG402")
    refused(lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG), "AVG", "BG405")
    refused(lambda: dist.all_reduce(ones, dist.ReduceOp.BAND), "BAND", "BG405")
    refused(lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX), "complex|Complex")
    refused(lambda: dist.all_reduce(torch.ones(2, dtype=torch.uint16)), "can't be reduced", "BG405")
    refused(lambda: dist.all_to_all_single(torch.ones(4), ones, [3, 1], [1, 2]), "add up to|split", "BG403")
    refused(lambda: group.send([ones], dist.get_rank(), 0), "one of the other 1", "BG404")
    two = torch.ones(2)
    for call in (
        lambda: dist.all_reduce(torch.ones(1).expand(4)),
        lambda: dist.all_gather([two, torch.ones(1).expand(2)], two),
        lambda: dist.all_gather_into_tensor(torch.ones(1, 2).expand(2, 2), two),
        lambda: dist.recv(torch.ones(1).expand(2), 1 - dist.get_rank()),
    ):
        refused(call, "one place in memory", "BG401")
    refused(lambda: dist.init_process_group("bagua"), "twice")
    dist.all_reduce(ones)
    assert ones.tolist() == [2.0] * 4


def test_bad_input_is_refused_on_the_rank_that_passed_it(ranks, tmp_path):
    ranks.run(rank_bad_input, 2, folder=str(tmp_path))


def outputs(ranks):
    ranks.wait(WAIT_S)
    assert all(rank.process.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT) for rank in ranks.started), [
        (rank.process.returncode, rank.output) for rank in ranks.started
    ]
    return [rank.output for rank in ranks.started]


def rank_large_calls_that_differ(folder):
    """They are read from where they lie, by ranks of one host."""
    dtype = (torch.float32, torch.int32)[begin(folder)]
    dist.all_gather_into_tensor(torch.zeros(200_000, dtype=dtype), torch.ones(100_000, dtype=dtype))


def test_large_calls_that_differ_are_an_error_on_all_ranks(ranks, tmp_path):
    ranks.start(rank_large_calls_that_differ, 2, folder=str(tmp_path))
    for output in outputs(ranks):
        assert "100000 x float32" in output and "100000 x int32" in output, output


SHAPES = {
    "a larger one first": [[0, 1], [0, 1, 2], [0, 1, 2]],
    "a circle": [[0, 1], [1, 2], [0, 2]],
    "no rank in common": [[0], [1, 2], [1, 2]],
    "nobody is a member": [[1, 2], [2], [0]],
}
"""Lists of ranks 0, 1 and 2."""


def error_of(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def rank_groups_that_differ(folder):
    """By shape: the error. What agrees goes on after each of them."""
    rank = begin(folder)
    found = {}
    for name, lists in SHAPES.items():
        dist.barrier()
        found[name] = error_of(lambda lists=lists: dist.new_group(lists[rank]))
        pair = dist.new_group([0, 2])
        if rank != 1:
            dist.all_reduce(tensor := torch.ones(1), group=pair)
            assert tensor.item() == 2
    return found


def test_groups_that_differ_are_an_error_on_every_rank(ranks, tmp_path):
    for rank, errors in enumerate(ranks.run(rank_groups_that_differ, 3, folder=str(tmp_path))):
        for name, lists in SHAPES.items():
            assert f"differs between ranks: rank {rank} passed ranks {lists[rank]}, rank " in errors[name], (rank, name)
            assert "[BG410]" in errors[name]


LOCAL_SHAPES = {
    "a circle": [[0, 1], [1, 2], [0, 2]],
    "one that waits for two that differ": [[0, 1], [0, 1, 2], [1, 2]],
}


def rank_local_groups_that_differ(folder):
    rank = begin(folder)
    found = {}
    for name, lists in LOCAL_SHAPES.items():
        dist.barrier()
        found[name] = error_of(lambda lists=lists: dist.new_group(lists[rank], use_local_synchronization=True))
        dist.new_group()  # names of groups depend on their number
    for _ in range(2):  # the second group has the name of the first one, which is over
        if rank != 2:
            pair = dist.new_group([0, 1], use_local_synchronization=True)
            dist.all_reduce(torch.ones(1), group=pair)
            dist.destroy_process_group(pair)
    dist.barrier()
    name = "one of two that was there before"
    if rank != 2:
        found[name] = error_of(lambda: dist.new_group([[0, 1], [0, 1, 2]][rank], use_local_synchronization=True))
    dist.barrier()  # who waits for a rank that was refused a moment ago may be told so
    dist.new_group()
    if rank != 1:  # who rightly never comes is not waited for
        pair = dist.new_group([0, 2], use_local_synchronization=True)
        dist.all_reduce(torch.ones(1), group=pair)
    dist.barrier()
    return found


def test_groups_that_members_alone_make_and_that_differ_are_an_error_on_every_rank(ranks, tmp_path):
    for rank, errors in enumerate(ranks.run(rank_local_groups_that_differ, 3, folder=str(tmp_path))):
        assert len(errors) == len(LOCAL_SHAPES) + (rank != 2)
        for name in errors:
            assert "differs between ranks: rank " in errors[name], (rank, name, errors)
            assert "waits in new_group() of ranks [" in errors[name], (rank, name, errors)


def rank_with_old_notes(folder):
    """A program that ends its groups and begins again, in one store."""
    import bagua.c10d  # noqa: F401

    store = dist.FileStore(f"{folder}/store", 3)
    rank = int(os.environ["RANK"])
    for lists in ([[0, 1], [0, 1, 2], [0, 1]], [[1, 2]] * 3, [[0, 1], [0, 1], [0, 2]]):
        dist.init_process_group("bagua", store=store, rank=rank, world_size=3)
        error = error_of(lambda lists=lists: dist.new_group(lists[rank]))
        assert bool(error) == (lists[1:] != lists[:-1]), error
        dist.barrier()
        dist.destroy_process_group()


def test_lists_of_an_earlier_default_group_are_not_compared(ranks, tmp_path):
    ranks.run(rank_with_old_notes, 3, folder=str(tmp_path))


def rank_dies_in_ddp(folder):
    rank = begin(folder)
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    for step in range(100):
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(4, 64)).sum().backward()


@pytest.mark.parametrize("elastic", [False, True])
def test_a_killed_rank_ends_ddp_on_the_others_with_its_name(ranks, tmp_path, elastic):
    """With a Python backend the survivor crashed."""
    ranks.start(rank_dies_in_ddp, 2, elastic=elastic, folder=str(tmp_path))
    ranks.wait(WAIT_S)
    survivor, killed = ranks.started
    assert killed.process.returncode == -signal.SIGKILL
    assert survivor.process.returncode == 1 and "rank 1 (" in survivor.output, survivor.output
    assert elastic == ("with_bagua() is the way" in survivor.output), survivor.output


def late(call):
    """The words of a call that is not done within its group's timeout."""
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="not done within its timeout of 1 s") as raised:
        call()
    assert time.monotonic() - begun >= 1
    return str(raised.value)


def rank_waits_in_vain(folder):
    """For operations, and for messages in a group that works on with others and had another timeout before."""
    rank = begin(folder)
    group, messages = dist.new_group(timeout=timedelta(seconds=1)), dist.new_group()
    change = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    change(timedelta(seconds=1), messages)
    words = []
    if rank == 0:
        words.append(late(lambda: dist.barrier(group)))
        with pytest.raises(RuntimeError, match="not done within"):  # the group is of no use any more
            dist.all_reduce(torch.ones(1), group=group)
        work = dist.irecv(torch.ones(1), 1)
        assert work is not None
        with pytest.raises(RuntimeError, match="was not done after 100 ms"):
            work.wait(timedelta(milliseconds=100))
        words.append(late(lambda: dist.recv(torch.ones(1), 1, messages, tag=1)))
        words.append(late(lambda: dist.send(torch.ones(300_000), 1, messages, tag=2)))
        words.append(late(lambda: dist.recv(torch.ones(1), None, messages, tag=3)))
    dist.all_reduce(tensor := torch.ones(1))  # others are not disturbed
    assert tensor.item() == 2
    if rank == 1:
        dist.send(torch.ones(1), 0)
        dist.send(torch.ones(1), 0, messages, tag=5)
    else:
        work.wait()
        dist.recv(torch.ones(1), 1, messages, tag=5)
    return words


def test_a_timeout_says_who_waits_for_whom(ranks, tmp_path):
    *named, any_source = ranks.run(rank_waits_in_vain, 2, folder=str(tmp_path))[0]
    for words in named:
        assert "rank 0 has been waiting for rank 1" in words and words.endswith("[BG503]"), words
    assert "ank 0 " in any_source and "waiting for" in any_source and any_source.endswith("[BG503]"), any_source


def rank_ends_groups(folder):
    rank = begin(folder)
    group = dist.new_group()
    work = dist.irecv(torch.ones(1), 1 - rank, group)
    assert work is not None
    dist.destroy_process_group(group)
    if hasattr(dist.ProcessGroup, "shutdown"):  # else torch only forgets the group
        with pytest.raises(RuntimeError, match="the group was destroyed on this rank"):
            work.wait()
    group = dist.new_group()
    if rank == 0 and hasattr(dist.ProcessGroup, "abort"):
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        group.abort()
        with pytest.raises(RuntimeError, match="aborted on this rank"):
            work.wait()
    dist.barrier()


def test_a_destroyed_or_aborted_group_ends_its_operations(ranks, tmp_path):
    ranks.run(rank_ends_groups, 2, folder=str(tmp_path))


def rank_asks_while_a_helper_frees(folder):
    """Freeing a tensor that Python knows needs the interpreter's lock. Rank 0 has it, and asks for a later work."""
    rank = begin(folder)
    group = dist.group.WORLD
    assert group is not None
    pair = dist.new_group()
    for turn in range(8):
        if rank == 0:
            dist.all_reduce(torch.ones(4), async_op=True).get_future()
            other = dist.all_reduce(torch.ones(4), group=pair if turn % 2 else group, async_op=True)
            assert other is not None
            dist.send(torch.ones(1), 1)
            while not other.is_completed():
                other.get_future()
        else:
            dist.recv(torch.ones(1), 0)
            dist.all_reduce(torch.ones(4))
            dist.all_reduce(torch.ones(4), group=pair if turn % 2 else group)


def test_questions_do_not_wait_for_a_thread_that_waits_for_the_interpreter(ranks, tmp_path):
    ranks.run(rank_asks_while_a_helper_frees, 2, folder=str(tmp_path))


def rank_with_a_wrong_number(folder):
    import bagua.c10d  # noqa: F401

    rank = int(os.environ["RANK"])
    dist.init_process_group("bagua", init_method=f"file://{folder}/store", rank=1 - rank, world_size=2)


def test_another_rank_than_the_daemons_is_refused(ranks, tmp_path):
    ranks.start(rank_with_a_wrong_number, 2, folder=str(tmp_path))
    for output in outputs(ranks):
        assert "leave rank and world_size to the environment" in output, output


def in_a_fork(call, code):
    """The exit code that ``code`` makes of the call's exception in a child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(int(WAIT_S))
    found = 99
    try:
        call()
        found = code(None)
    except BaseException as error:
        found = code(error)
    finally:
        os._exit(found)


def rank_forks(folder):
    """As workers of a DataLoader do. The parent has threads that drive operations; a child has none of them."""
    begin(folder)
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.get_future().wait()

    def refused_there(error):
        return 0 if isinstance(error, RuntimeError) and "fork" in str(error) else 1

    assert in_a_fork(lambda: dist.all_reduce(torch.ones(1)), refused_there) == 0
    assert in_a_fork(lambda: dist.irecv(torch.ones(1), 1 - dist.get_rank()).wait(), refused_there) == 0
    assert in_a_fork(gc.collect, lambda error: 0 if error is None else 1) == 0
    dist.all_reduce(tensor)
    assert tensor.item() == 4


def test_a_fork_of_a_rank_is_refused_and_disturbs_nobody(ranks, tmp_path):
    ranks.run(rank_forks, 2, folder=str(tmp_path))
