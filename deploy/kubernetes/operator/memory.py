"""Facts about a job that last from look to look. They save time alone: pods are made and deleted, and jobs submitted,
by what was just read."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bagua.operator.facts import Manifest, Pod, Pods, Trouble
from bagua.operator.news import Journal

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before a thing that was refused is tried again
CALM_S = 60.0  # so long after a pause, the next one is a first one
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


class Kept(Generic[T]):
    """Something that was read, as long as nothing tells of a change."""

    def __init__(self) -> None:
        self._read_at = 0.0
        self._changes, self._changes_read = 1, 0
        self._value: T

    def get(self, read: Callable[[], T], now: float, lasts_s: float) -> T:
        """Returns what was read less than ``lasts_s`` ago, if it may not have changed; else calls ``read``."""
        changes = self._changes  # before the read: a change in its course makes the next look read again
        if changes != self._changes_read or now - self._read_at >= lasts_s:
            self._value, self._read_at, self._changes_read = read(), now, changes
        return self._value

    def put(self, value: T) -> None:
        """Takes what this process has written."""
        self._value = value

    def peek(self) -> T | None:
        """Returns what was read last, if anything was."""
        return self._value if self._changes_read else None

    def change(self) -> None:
        """The next look reads it; from any thread."""
        self._changes += 1


class Numbers:
    """Counts of the operator's life."""

    def __init__(self) -> None:
        self.looks = self.faults = 0
        self.refusals: Counter[str] = Counter()  # by the code of the Kubernetes API, or its reason; "none": no answer


class Memory:
    """Memory of one job. ``uid``: of the BaguaJob; empty: no look has found it yet."""

    def __init__(self, uid: str = "") -> None:
        self.uid = uid
        self.running = ""  # id of an attempt that had not ended at the last look
        self.spec: Manifest | None = None  # the last that could be used
        self.refusal: Trouble | None = None  # of what was tried last
        self._ends: dict[str, str] = {}
        self._refused_of, self._pause_s, self._again_at = "", 0.0, 0.0
        self._versions: deque[str] = deque(maxlen=VERSIONS)
        self.body: Kept[Manifest | None] = Kept()
        self.pods: Kept[Pods] = Kept()
        self.objects: Kept[Objects] = Kept()
        self.journal = Journal()

    def change(self) -> None:
        """The next look reads all of it."""
        for one in (self.body, self.pods, self.objects):
            one.change()

    def ends(self, pods: Iterable[Pod]) -> dict[str, str]:
        """Returns how pods ended that were seen, and whose daemons run no more; of one that was deleted why it had to
        go, or nothing."""
        self._ends.update({pod.name: pod.end if pod.ended else pod.notice for pod in pods})
        there = {pod.name for pod in pods if not pod.ended}
        return {name: words for name, words in self._ends.items() if name not in there}

    def refused(self, trouble: Trouble, generation: str, now: float) -> None:
        """Notes a refusal: the next try follows after a pause, which doubles with each of this generation that soon
        follows another one."""
        again = self._refused_of == generation and now < self._again_at + CALM_S
        if not again or now >= self._again_at:  # several refusals of one look count once
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if again else FIRST_PAUSE_S
            self._again_at = now + self._pause_s
        self.refusal, self._refused_of = trouble, generation

    def pause_s(self, generation: str, now: float) -> float:
        """Returns the seconds before the next try; 0: now, as after a change of the specification."""
        waits = self.refusal is not None and self._refused_of == generation
        return max(0.0, self._again_at - now) if waits else 0.0

    def written(self, body: Manifest) -> None:
        """Notes the version of the BaguaJob that this process wrote."""
        self._versions.append(_version(body))
        self.body.put(body)

    def has_written(self, body: Mapping[str, Any]) -> bool:
        """True if ``written`` was called with this version."""
        version = _version(body)
        return bool(version) and version in self._versions


def _version(body: Mapping[str, Any]) -> str:
    return str(body["metadata"].get("resourceVersion", ""))
