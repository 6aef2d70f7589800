"""Signals that wait."""

import os
import signal

import pytest

from bagua.cli.cluster.signals import uninterrupted


def test_a_signal_waits_for_the_end_of_the_block():
    done = []

    def handler(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), uninterrupted():
            os.kill(os.getpid(), signal.SIGINT)
            done.append(True)
        assert done == [True]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
