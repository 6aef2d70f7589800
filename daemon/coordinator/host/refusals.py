"""Logs refused callers, one line a minute at most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import structlog

PERIOD_S = 60.0
_MAX_ADDRESSES = 1_000
_SHOWN = 10
_OTHERS = "others"

log = structlog.get_logger("coordinator.rpc")


class Refusals:
    """Counts refusals by address and kind; of many there is one line in ``PERIOD_S``."""

    def __init__(self, clock: Callable[[], float], warn: Callable[..., Any] | None = None) -> None:
        self._clock = clock
        self._warn = warn or log.warning
        self._told_at = float("-inf")
        self._addresses: Counter[str] = Counter()
        self._kinds: Counter[str] = Counter()

    def add(self, address: str, kind: str) -> None:
        """Counts one more refusal from ``address``."""
        if address not in self._addresses and len(self._addresses) >= _MAX_ADDRESSES:
            address = _OTHERS
        self._addresses[address] += 1
        self._kinds[kind] += 1

    def tell(self) -> None:
        """Logs the sum since the last time, if there is one and the time has come."""
        now = self._clock()
        if now - self._told_at >= PERIOD_S:
            if self._kinds:
                self._told_at = now
            self.tell_rest()

    def tell_rest(self) -> None:
        """Logs what was not told yet."""
        if not self._kinds:
            return
        addresses = dict(self._addresses.most_common(_SHOWN))
        more = len(self._addresses) - len(addresses)
        self._warn("refused", **self._kinds, addresses=addresses, **({"more_addresses": more} if more else {}))
        self._addresses.clear()
        self._kinds.clear()
