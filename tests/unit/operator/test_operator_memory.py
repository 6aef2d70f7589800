"""Facts about a job that the operator keeps from look to look."""

from dataclasses import replace

from bagua.operator.facts import Pod, Trouble
from bagua.operator.memory import Kept, Memory

LASTS_S = 5.0


def test_what_was_read_is_read_again_when_it_is_old_or_may_have_changed():
    kept = Kept()
    read = []
    now = 0.0
    assert kept.peek() is None

    def look():
        kept.get(lambda: read.append("") or "read", now, LASTS_S)
        return len(read)

    assert look() == 1 and look() == 1 and kept.peek() == "read"
    now += LASTS_S
    assert look() == 2 and look() == 2
    kept.change()
    assert look() == 3 and look() == 3
    kept.put("written")
    assert kept.get(lambda: "read", now, LASTS_S) == "written"


def test_it_knows_how_pods_ended():
    memory = Memory()
    alive, warned = Pod("j-0", 0, "Running"), Pod("j-1", 1, "Running", notice="evicted: Preempted")
    assert memory.ends([alive, warned]) == {}
    assert memory.ends([replace(alive, phase="Failed", end="OOMKilled")]) == {
        "j-0": "OOMKilled",
        "j-1": "evicted: Preempted",
    }
    assert memory.ends([warned]) == {"j-0": "OOMKilled"}
    assert memory.ends([alive, warned]) == {}, "another pod of that name runs"


def test_pauses_after_refusals_double_until_the_specification_changes():
    memory, now = Memory(), 100.0
    assert memory.pause_s("1", now) == 0
    pauses = []
    for _ in range(8):
        memory.refused(Trouble("Forbidden", "exceeded quota"), "1", now)
        pauses.append(memory.pause_s("1", now))
        now += pauses[-1]
        assert memory.pause_s("1", now) == 0
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    memory.refused(Trouble("Forbidden", "exceeded quota"), "1", now)
    assert memory.pause_s("2", now) == 0
    memory.refused(Trouble("Forbidden", "exceeded quota"), "2", now)
    assert memory.pause_s("2", now) == 1
    memory.refused(Trouble("Forbidden", "another at the same time"), "2", now)
    assert memory.pause_s("2", now) == 1
