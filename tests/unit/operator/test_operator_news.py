"""Events of Kubernetes about a BaguaJob."""

from bagua.operator import facts, status
from bagua.operator.facts import News, Pod, Seen, Trouble
from bagua.operator.news import Journal


def seen(*pods, **status):
    return Seen({"metadata": {"name": "j", "namespace": "n", "uid": "u"}, "spec": {}, "status": status}, pods)


ONE, TWO = Pod("j-0", 0, "Running"), Pod("j-1", 1, "Running")


def test_pods_that_somebody_else_ends_are_lost():
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


def test_a_pod_that_ends_before_it_is_seen_alive_is_told_once():
    journal = Journal()
    journal.did(facts.Create({"kind": "Pod", "metadata": {"name": "j-0"}}))
    trouble = journal.looked(seen(Pod("j-0", 0, "Failed", end="StartError (exit code 128)")))
    assert trouble is not None
    journal.wrote({}, status.with_trouble({}, trouble, 0.0))
    assert [one.reason for one in journal.take()] == ["PodCreated", "PodLost"]
