"""Events of Kubernetes about a BaguaJob."""

from __future__ import annotations

from typing import Any

from bagua.operator import facts, status
from bagua.operator.facts import News, Pod, Seen, Trouble
from bagua.operator.news import Journal


def seen(*pods: Pod, **status: Any) -> Seen:
    return Seen({"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": {}, "status": status}, pods)


ONE, TWO = Pod("j-0", 0, "Running"), Pod("j-1", 1, "Running")


def test_pods_that_somebody_else_ends_are_lost() -> None:
    journal = Journal()
    journal.looked(seen(ONE, TWO))
    assert journal.take() == []
    ended = Pod("j-0", 0, "Failed", end="OOMKilled (exit code 137)")
    evicted = Pod("j-1", 1, "Running", leaving=True, notice="evicted: spot")
    assert journal.looked(seen(ended, evicted)) == Trouble("PodLost", "j-0 has ended: OOMKilled (exit code 137)")
    assert journal.take() == [
        News("PodLost", "j-0 has ended: OOMKilled (exit code 137), j-1 is being deleted: evicted: spot", True)
    ]
    journal.looked(seen())
    assert journal.take() == [], "once is enough"
    journal.looked(seen(ONE, TWO))
    journal.looked(seen(ONE))
    assert journal.take() == [News("PodLost", "j-1 is gone", True)]
    journal.did(facts.Delete("Pod", "j-0", "fewer pods are wanted"))
    journal.looked(seen())
    assert journal.take() == [News("PodDeleted", "j-0: fewer pods are wanted")]
    journal.looked(seen(ONE))
    journal.looked(seen(Pod("j-0", 0, "Succeeded"), phase="Succeeded"))
    assert journal.take() == [], "a pod that has ended with its job is not lost"


def test_a_pod_that_ends_before_it_is_seen_alive_is_told_once() -> None:
    """By the event about its loss; the condition has the same words."""
    journal = Journal()
    journal.did(facts.Create({"kind": "Pod", "metadata": {"name": "j-0"}}))
    trouble = journal.looked(seen(Pod("j-0", 0, "Failed", end="StartError (exit code 128)")))
    assert trouble is not None
    journal.wrote({}, status.with_trouble({}, trouble, 0.0))
    assert [one.reason for one in journal.take()] == ["PodCreated", "PodLost"]


def test_what_is_done_together_is_told_together() -> None:
    journal = Journal()
    for name in ("j-0", "j-1"):
        journal.did(facts.Create({"kind": "Pod", "metadata": {"name": name}}))
    journal.did(facts.Scale("id", 3))
    assert [(one.reason, one.message) for one in journal.take()] == [
        ("PodCreated", "j-0, j-1"),
        ("Scaled", "The job has 3 pods from its next step on."),
    ]


def test_phases_and_refusals_are_told_once() -> None:
    blocked = {"type": "Blocked", "status": "True", "reason": "Forbidden", "message": "exceeded quota"}
    new = {"phase": "Pending", "message": "It waits.", "conditions": [blocked]}
    journal = Journal()
    journal.wrote({}, new)
    assert journal.take() == [News("Pending", "It waits."), News("Forbidden", "exceeded quota", True)]
    journal.wrote(new, {**new, "step": 3})
    assert journal.take() == []
