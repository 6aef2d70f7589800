"""Facts about a job that last from look to look. They save time alone: pods are made and deleted, and jobs submitted,
by what was just read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bagua.operator.facts import Manifest, Trouble

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a thing that was refused is tried again
VERSIONS = 8  # the API server tells of as many writes, at most, after later ones


@dataclass(frozen=True)
class Objects:
    """Objects of a job that the operator alone should write, and its Secrets. ``hashes``: by kind and name.
    ``started_with``: the credentials that the coordinator was started with."""

    hashes: Mapping[tuple[str, str], str]
    started_with: str
    token: Manifest | None
    tls: Manifest | None

    @property
    def access(self) -> tuple[Manifest, Manifest] | None:
        """The Secrets with the token and the certificate for calls of the coordinator; None: it was not started yet."""
        return (self.token, self.tls) if self.started_with and self.token and self.tls else None


class Memory:
    """Memory of one job. ``uid``: of the BaguaJob; empty: no look has found it yet."""

    def __init__(self, uid: str = "") -> None:
        self.uid = uid
        self.running = ""  # id of an attempt that had not ended at the last look
        self.refusal: Trouble | None = None  # of what was tried last
        self._refused_of, self._pause_s, self._again_at = "", 0.0, 0.0
        self._versions: deque[str] = deque(maxlen=VERSIONS)
        self._objects: Objects | None = None
        self._read_at = 0.0
        self._changes = self._changes_read = 0

    def objects(self, read: Callable[[], Objects], now: float, lasts_s: float) -> Objects:
        """Returns the objects that were read less than ``lasts_s`` ago, if none was missing or may have changed; else
        calls ``read``. Old ones do no harm: an object is written once more, or a little later.
        """
        changes, kept = self._changes, self._objects
        fresh = changes == self._changes_read and now - self._read_at < lasts_s
        if kept is not None and kept.access and fresh:
            return kept
        self._objects, self._read_at, self._changes_read = read(), now, changes
        return self._objects

    def refused(self, trouble: Trouble, generation: str, now: float) -> None:
        """Notes a refusal: the next try follows after a pause, which doubles with each of this generation."""
        again = self.refusal is not None and self._refused_of == generation
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if again else FIRST_PAUSE_S
        self.refusal, self._refused_of, self._again_at = trouble, generation, now + self._pause_s

    def pause_s(self, generation: str, now: float) -> float:
        """Returns the seconds before the next try; 0: now, as after a change of the specification."""
        waits = self.refusal is not None and self._refused_of == generation
        return max(0.0, self._again_at - now) if waits else 0.0

    def objects_change(self) -> None:
        """The next look reads them; from any thread."""
        self._changes += 1

    def written(self, body: Manifest) -> None:
        """Notes the version of the BaguaJob that this process wrote."""
        self._versions.append(_version(body))

    def has_written(self, body: Mapping[str, Any]) -> bool:
        """True if ``written`` was called with this version."""
        version = _version(body)
        return bool(version) and version in self._versions


def _version(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("resourceVersion", ""))
