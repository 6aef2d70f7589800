"""BaguaJobs on a real API server; a small kubelet runs pods as processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rig import kubelet, kubernetes
from rig.operators import Operated

IMAGE = "bagua:test"


@pytest.fixture(scope="module")
def cluster(core: None) -> Iterator[Operated]:
    reason = kubernetes.missing() or kubelet.missing()
    if reason:
        pytest.skip(reason)
    made = Operated()
    try:
        made.start()
        made.start_operator()
        yield made
    finally:
        made.close()


def test_a_job_runs_a_program_and_succeeds(cluster: Operated) -> None:
    run = {"program": "/bin/sh", "args": ["-c", "test $WORD = hello"], "env": [{"name": "WORD", "value": "hello"}]}
    cluster.submit("hello", image=IMAGE, replicas=2, run=run, runPolicy={"restartPolicy": "Never"})
    status = cluster.wait_for_phase("hello", "Succeeded", "Failed")
    assert status["phase"] == "Succeeded", cluster.explain()
    cluster.wait(lambda: not cluster.pods("hello"))
