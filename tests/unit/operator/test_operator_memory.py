"""Facts about a job that the operator keeps from look to look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bagua.operator.memory import Memory, Objects

WHOLE = Objects({("Service", "j"): "hash"}, "mark", {"data": {}}, {"data": {}})
LASTS_S = 5.0


def test_objects_are_read_again_when_they_are_old_or_may_have_changed() -> None:
    memory, now = Memory(), 100.0
    read: list[Objects] = []

    def look(found: Objects = WHOLE) -> int:
        memory.objects(lambda: read.append(found) or found, now, LASTS_S)
        return len(read)

    assert look() == 1 and look() == 1
    now += LASTS_S
    assert look() == 2 and look() == 2
    memory.objects_change()
    assert look() == 3 and look() == 3
    memory.objects_change()
    incomplete = replace(WHOLE, tls=None)  # cert-manager makes it, and nothing tells when
    assert look(incomplete) == 4 and look(incomplete) == 5


def test_a_change_during_the_reading_is_not_missed() -> None:
    memory = Memory()

    def read() -> Objects:
        memory.objects_change()
        return WHOLE

    memory.objects(read, 0.0, LASTS_S)
    other = replace(WHOLE, started_with="other")
    assert memory.objects(lambda: other, 0.0, LASTS_S) is other


def body(version: str, **status: Any) -> dict[str, Any]:
    metadata = {"name": "j", "namespace": "n", "uid": "u", "resourceVersion": version}
    return {"metadata": metadata, "spec": {}, "status": status}


def test_own_versions_of_a_job_are_known() -> None:
    memory = Memory()
    memory.written(body("2", attempt=0))
    assert memory.has_written(body("2")) and not memory.has_written(body("1"))
    nameless = body("")  # an API server that has no versions
    memory.written(nameless)
    assert not memory.has_written(nameless)
