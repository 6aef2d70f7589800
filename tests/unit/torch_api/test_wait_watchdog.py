"""When a rank with a GPU gives up."""

from __future__ import annotations

import threading

from bagua.base.errors import CommunicationError
from bagua.torch_api.cuda.wait_watchdog import WaitWatchdog


def test_long_waits_are_told_and_the_longest_ends_it() -> None:
    """Short ones interest nobody; another wait begins anew."""
    waits = iter([(0.0, ""), (0.01, ""), (1.0, "a"), (1.5, "a"), (2.0, "a"), (0.01, ""), (0.5, "b"), (9.0, "b")])
    told: list[tuple[float, str]] = []
    over = threading.Event()

    def go_on(waited: float, what: str) -> float:
        told.append((waited, what))
        if waited == 9.0:
            raise CommunicationError("gave up")
        return 1.0

    words: list[str] = []

    def give_up(text: str) -> None:
        words.append(text)
        over.set()

    patience = WaitWatchdog(0.02, lambda: next(waits), go_on, give_up)
    assert over.wait(30)
    patience.stop()
    assert told == [(1.0, "a"), (2.0, "a"), (0.5, "b"), (9.0, "b")] and words == ["gave up"]


def test_it_stops_at_once() -> None:
    patience = WaitWatchdog(1e6, lambda: (0.0, ""), lambda *_: 1.0, lambda _: None)
    patience.stop()
    patience.stop()
