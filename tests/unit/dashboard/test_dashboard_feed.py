"""A dashboard's feeds, over a client that answers as a test says."""

import time

from bagua.dashboard.feed import Feeds
from bagua.proto import common_pb2, job_pb2

WAIT_S = 30.0
RUNS = job_pb2.Job(job_id="job-1", state=common_pb2.JOB_STATE_RUNNING)
OVER = job_pb2.Job(job_id="job-1", state=common_pb2.JOB_STATE_SUCCEEDED)


class Service:
    """The job ends between two questions."""

    def list(self, *more):
        return [RUNS]

    def page(self, *more):
        return [OVER], ""

    def nodes(self):
        return []

    def close(self):
        """Nothing is open."""


def test_a_job_that_ends_while_it_is_looked_for_is_there_once():
    """`bagua top` ended by an exception when it was in both lists."""
    feeds = Feeds(Service)
    try:
        with feeds.cluster():
            deadline = time.monotonic() + WAIT_S
            while not feeds.recent:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert feeds.recent == (OVER,) and not feeds.running
    finally:
        feeds.close()
