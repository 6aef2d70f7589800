"""When a rank with a GPU gives up."""

import threading

from bagua.base.errors import CommunicationError
from bagua.torch_api.cuda.wait_watchdog import WaitWatchdog


def test_long_waits_are_told_and_the_longest_ends_it():
    """Short ones interest nobody; another wait begins anew."""
    waits = iter([(0.0, ""), (0.01, ""), (1.0, "a"), (1.5, "a"), (2.0, "a"), (0.01, ""), (0.5, "b"), (9.0, "b")])
    told = []
    over = threading.Event()

    def go_on(waited, what):
        told.append((waited, what))
        if waited == 9.0:
            raise CommunicationError("gave up")
        return 1.0

    words = []

    def give_up(text):
        words.append(text)
        over.set()

    patience = WaitWatchdog(0.02, lambda: next(waits), go_on, give_up)
    assert over.wait(30)
    patience.stop()
    assert told == [(1.0, "a"), (2.0, "a"), (0.5, "b"), (9.0, "b")] and words == ["gave up"]


def test_it_stops_at_once():
    patience = WaitWatchdog(1e6, lambda: (0.0, ""), lambda *_: 1.0, lambda _: None)
    patience.stop()
    patience.stop()
