"""Large blocks of torch's memory are kept for tensors of the same size, and never more than were in use at once."""

import os
import random
import subprocess
import sys
import threading

import pytest

MIB = 1 << 20


def in_a_process(name):
    """Runs this function of the file in a process of its own: the allocator is that of a process, for good."""
    done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def blocks(sizes, seed):
    """Tensors come and go at random; each holds its own numbers until then."""
    import torch

    chosen, held = random.Random(seed), []
    for number in range(300):
        if held and chosen.random() < 0.5:
            one, value = held.pop(chosen.randrange(len(held)))
            assert bool((one == value).all())
        else:
            held.append((torch.full((chosen.choice(sizes),), float(number)), float(number)))
        yield


def check_kept():
    import torch

    from bagua.csrc import load_c10d

    native = load_c10d()
    before = torch.ones(MIB)
    native.keep_blocks()
    native.keep_blocks()
    assert native.block_bytes() == (0, 0, 0)
    del before  # of the allocator before
    first = torch.empty(MIB)
    place = first.data_ptr()
    storage = first.untyped_storage()
    storage.resize_(0)  # as FSDP frees a unit
    assert native.block_bytes() == (0, 4 * MIB, 4 * MIB)
    storage.resize_(4 * MIB)
    assert first.data_ptr() == place
    del first, storage
    other = torch.empty(2 * MIB)  # of another size: there is no room for both
    assert native.block_bytes() == (8 * MIB, 0, 8 * MIB)
    small = torch.empty(1000)
    assert native.block_bytes()[0] == 8 * MIB
    del other, small
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        torch.empty(1 << 50)
    assert native.block_bytes() == (0, 0, 8 * MIB)  # what was kept is given back first
    for _ in blocks((MIB // 4, MIB // 2, MIB, 1000), seed=1):
        used, kept, most = native.block_bytes()
        assert used + kept <= most
    assert native.block_bytes()[0] == 0


def check_threads_and_forks():
    import torch

    from bagua.csrc import load_c10d

    load_c10d().keep_blocks()
    failed = []

    def run(seed):
        try:
            for _ in blocks((MIB // 4, MIB // 2), seed):
                pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(5):  # while threads hold and free blocks
        child = os.fork()
        if child == 0:
            os._exit(int(torch.full((MIB,), 3.0).sum().item() != 3 * MIB))
        assert os.waitpid(child, 0)[1] == 0
    for thread in threads:
        thread.join()
    assert not failed, failed


def test_a_freed_block_is_that_of_the_next_tensor_of_its_size():
    in_a_process("check_kept")


def test_threads_and_forked_children_allocate():
    in_a_process("check_threads_and_forks")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
