"""Lines of the log that callers without a credential can bring about."""

import structlog

from bagua.daemon.log_lines import Rarely


def test_one_line_a_minute_for_each_kind():
    now = [0.0]
    rarely = Rarely(lambda: now[0])

    def line(**more):
        try:
            return dict(rarely(None, "info", {"event": "refused", **more}))
        except structlog.DropEvent:
            return None

    assert line(once_a_minute="a") == {"event": "refused"}
    assert line(once_a_minute="b") == {"event": "refused"}
    assert [line(once_a_minute="a") for _ in range(50)] == [None] * 50
    assert line() == {"event": "refused"}
    now[0] = 60.0
    assert line(once_a_minute="a") == {"event": "refused", "left_out": 50}
    now[0] = 120.0
    assert line(once_a_minute="a") == {"event": "refused"}
