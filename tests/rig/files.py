"""Processes of a test wait for each other by files: what they wait for comes without them."""

import time

DEADLINE_S = 120.0


def await_file(path, limit_s=DEADLINE_S):
    """Returns when it is there. For hangs alone it raises AssertionError."""
    deadline = time.monotonic() + limit_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.002)
