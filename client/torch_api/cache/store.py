"""Stores of bytes by key, under the names of the original."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from bagua.base.errors import BaguaError


class StoreError(BaguaError):
    """A store can't be reached, or can't be written. What it had may be there again later."""


class Store(ABC):
    """A mapping from keys to bytes that several processes share. It may forget what it was given.

    All methods but ``shutdown`` raise StoreError where the store can't be used.
    """

    @abstractmethod
    def set(self, key: str, value: bytes) -> None:
        """Keeps ``value``, in place of what was kept under this key."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Returns the value; None: nothing is kept under this key."""

    @abstractmethod
    def num_keys(self) -> int:
        """Returns the number of keys."""

    @abstractmethod
    def clear(self) -> None:
        """Deletes all entries."""

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        """Sets each of the values."""
        for key, value in dictionary.items():
            self.set(key, value)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Gets each of the values, in the order of the keys."""
        return [self.get(key) for key in keys]

    def status(self) -> bool:
        """True if the store can be used now. Raises nothing."""
        try:
            self.num_keys()
        except StoreError:
            return False
        return True

    def shutdown(self) -> None:  # noqa: B027 - most have nothing to end
        """Ends servers that were started for this store, and connections. Raises nothing."""


class ClusterStore(Store):
    """A store made of several: each key has its place in one of them, the same in all processes.

    ``stores``: at least one, in the same order everywhere. ``hash_fn``: a number for a key; by default its CRC-32.
    """

    def __init__(self, stores: Sequence[Store], hash_fn: Callable[[str], int] | None = None) -> None:
        if not stores:
            raise ValueError("A ClusterStore needs at least one store. [BG705]")
        self.stores = list(stores)
        self.num_stores = len(self.stores)
        # The same in all processes, which ``hash`` of Python is not.
        self.hash_fn = hash_fn or (lambda key: zlib.crc32(key.encode()))

    def route(self, key: str) -> Store:
        """The store in which this key has its place."""
        return self.stores[self._place(key)]

    def _place(self, key: str) -> int:
        return self.hash_fn(key) % self.num_stores

    def set(self, key: str, value: bytes) -> None:
        self.route(key).set(key, value)

    def get(self, key: str) -> bytes | None:
        return self.route(key).get(key)

    def num_keys(self) -> int:
        """Returns the number of keys in all stores together."""
        return sum(store.num_keys() for store in self.stores)

    def clear(self) -> None:
        for store in self.stores:
            store.clear()

    def mset(self, dictionary: Mapping[str, bytes]) -> None:
        """Sets values with one call for each store that gets something."""
        parts: dict[int, dict[str, bytes]] = {}
        for key, value in dictionary.items():
            parts.setdefault(self._place(key), {})[key] = value
        for place, part in parts.items():
            self.stores[place].mset(part)

    def mget(self, keys: Sequence[str]) -> list[bytes | None]:
        """Gets values with one call for each store that is asked."""
        parts: dict[int, list[str]] = {}
        for key in keys:
            parts.setdefault(self._place(key), []).append(key)
        found: dict[str, bytes | None] = {}
        for place, part in parts.items():
            found.update(zip(part, self.stores[place].mget(part), strict=True))
        return [found[key] for key in keys]

    def status(self) -> bool:
        """True if all stores can be used."""
        return all(store.status() for store in self.stores)

    def shutdown(self) -> None:
        for store in self.stores:
            store.shutdown()
