"""Works of the backend in Python, before torch keeps them itself."""

from __future__ import annotations

import pytest

from bagua.c10d import work
from bagua.c10d.work import KEPT, MOST_KEPT, Operation


def test_a_work_is_kept_until_somebody_asks_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "KEEPS", True)
    waited, asked, forgotten = (Operation("barrier", [], lambda: None, 5.0) for _ in range(3))
    for operation in (waited, asked, forgotten):
        operation.run()
        assert KEPT[id(operation)] is operation
    waited.wait()
    asked.get_future().wait()
    assert list(KEPT.values()) == [forgotten]
    newer = [Operation("barrier", [], lambda: None, 5.0) for _ in range(MOST_KEPT)]
    assert list(KEPT.values()) == newer
    KEPT.clear()
