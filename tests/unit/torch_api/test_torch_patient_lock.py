"""The lock of a rank's threads: one that waits long says for which other one, and goes on."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from bagua.torch_api.comm.commit.flags import Flags
from bagua.torch_api.comm.patient_lock import PatientLock
from bagua.torch_api.comm.step_state import Followers


class Waits:
    """Notes the words, and lets the holder end at the second time."""

    first_warning_s = 0.01

    def __init__(self):
        self.words = []
        self.over = threading.Event()

    def go_on(self, waited, *, more, ends):
        self.words.append((waited, more, ends))
        if len(self.words) == 2:
            self.over.set()
        return 0.02 if len(self.words) < 2 else 60.0


def test_a_thread_that_waits_names_the_other_one():
    waits = Waits()
    lock, held = PatientLock(waits), threading.Event()

    def hold():
        with lock:
            held.set()
            assert waits.over.wait(60.0)

    holder = threading.Thread(target=hold, name="trainer-2")
    holder.start()
    assert held.wait(60.0)
    with lock, lock:  # it may be taken again
        holder.join()
    assert [(waited, ends) for waited, _, ends in waits.words] == [(0.01, False), (pytest.approx(0.03), False)]
    assert all("waits for thread trainer-2, which enters the next generation" in more for _, more, _ in waits.words)


def test_an_error_gives_it_back():
    lock = PatientLock(Waits())
    with pytest.raises(ValueError, match="mine"), lock:
        raise ValueError("mine")
    taken = threading.Thread(target=lock.__enter__)
    taken.start()
    taken.join(60.0)
    assert not taken.is_alive()


def test_flags_that_are_over_and_were_not_noted_are_dropped():
    """An exception such as Ctrl-C comes between the core's answer and the next line of Python."""
    session = SimpleNamespace(connection=SimpleNamespace(done=lambda ticket: 1 / ticket))
    lock = PatientLock(session.connection)
    flags = Flags(session, Followers(), lock)
    assert lock.take_if_free()
    flags.early, flags.heard, flags.sent = True, False, SimpleNamespace(ticket=0)
    flags.drop()
    assert (flags.early, flags.heard, flags.sent) == (False, True, None)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.take_if_free).result(), "no other thread may enter a generation"
