"""Chooses what people are told of a BaguaJob by Events: phases, refusals, pods that come and go, changes of scale."""

from __future__ import annotations

from bagua.operator import facts, status
from bagua.operator.facts import Action, Manifest, News, Pod, Seen, Trouble

REPLACED, LOST = "PodsReplaced", "PodLost"
TOLD = ("Invalid", status.BLOCKED, "Changing")  # conditions


class Journal:
    """News of one job that wait to be told. It remembers pods from look to look: one that was lost while no operator
    ran is not told of."""

    def __init__(self) -> None:
        self._waiting: list[News] = []
        self._alive: set[str] = set()
        self._deleted: set[str] = set()

    def looked(self, seen: Seen) -> Trouble | None:
        """Tells of pods that were there at the last look, and that nobody here has deleted. Returns how those ended
        that ended by themselves."""
        pods = {pod.name: pod for pod in seen.pods}
        alive = {name for name, pod in pods.items() if not pod.ended and not pod.leaving}
        lost = sorted(self._alive - alive - self._deleted) if seen.status.get("phase") not in status.ENDED else []
        self._waiting += [News(LOST, f"{name} {_end(pods.get(name))}", True) for name in lost]
        self._alive = alive
        self._deleted.clear()
        ended = [f"{name} {_end(pods[name])}" for name in lost if name in pods and pods[name].ended]
        return Trouble(LOST, ", ".join(ended)) if ended else None

    def wrote(self, old: Manifest, new: Manifest) -> None:
        """Tells of another phase, of refusals, and of pods that are replaced."""
        phase, message = new.get("phase"), new.get("message")
        if phase and phase != old.get("phase"):
            self._waiting.append(News(phase, message or phase, phase in (status.FAILED, status.RESTARTING)))
        told = [(one["type"], one["message"]) for one in old.get("conditions", []) if one["status"] == "True"]
        for one in new.get("conditions", []):
            known = (one["type"], one["message"]) in told or one["reason"] == LOST
            if one["type"] in TOLD and one["status"] == "True" and not known:
                self._waiting.append(News(one["reason"], one["message"], one["reason"] != REPLACED))

    def did(self, action: Action) -> None:
        """Tells of what the operator has done."""
        match action:
            case facts.Create(manifest) if manifest["kind"] == "Pod":
                self._alive.add(manifest["metadata"]["name"])
                self._waiting.append(News("PodCreated", manifest["metadata"]["name"]))
            case facts.Delete("Pod", name, why):
                self._deleted.add(name)
                self._waiting.append(News("PodDeleted", f"{name}: {why}" if why else name))
            case facts.Scale(_, nodes):
                self._waiting.append(News("Scaled", f"The job has {nodes} pods from its next step on."))
            case _:
                pass

    def take(self) -> list[News]:
        """Returns all that waits; of one kind together."""
        messages: dict[tuple[str, bool], list[str]] = {}
        for one in self._waiting:
            messages.setdefault((one.reason, one.warning), []).append(one.message)
        self._waiting = []
        return [News(reason, ", ".join(found), warning) for (reason, warning), found in messages.items()]


def _end(pod: Pod | None) -> str:
    if pod is None:
        return "is gone"
    how, why = ("has ended", pod.end) if pod.ended else ("is being deleted", pod.notice)
    return f"{how}: {why}" if why else how
